"""Who asks for a suspended stream, and whose asking gives it more time."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.api.openai.chat_completion import ChunkWire
from app.errors import Draining, ServingError
from app.intake.continued_streams import ContinuedStreams
from app.stream.token_stream import SUSPENDED
from tests.support.generations import Generations, generations, running

TIMEOUT_S = 600.0


class Clock:
    """Seconds, as a test sets them."""

    now_s = 1000.0

    def __call__(self) -> float:
        """The time set."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """The clock of what is suspended."""
    return Clock()


@pytest.fixture
async def world(tmp_path: Path, clock: Clock) -> AsyncIterator[Generations]:
    """A pipeline with a stream that was suspended behind its first word, its time over in a second."""
    async with generations(tmp_path, suspend_timeout_s=TIMEOUT_S, clock_s=clock) as made:
        stream, serving = await running(made)
        stream.cancel(SUSPENDED)
        await serving
        await made.suspensions.drained()
        clock.now_s += TIMEOUT_S - 1
        yield made


def continued_streams(world: Generations) -> ContinuedStreams:
    """What finds the stream. Its answer is not continued: the server is draining by then."""

    async def nothing(*_arguments: Any) -> None:
        return None

    async def draining(*_arguments: Any) -> None:
        raise Draining("draining")

    parts: Any = SimpleNamespace(
        streams=SimpleNamespace(find=lambda *_: None),
        archive=SimpleNamespace(find=nothing),
        budgets=SimpleNamespace(resume=draining),
        suspensions=world.suspensions,
    )
    return ContinuedStreams(parts, 1 << 20)


@pytest.mark.parametrize(
    ("owner", "after", "continues", "expired"),
    [
        pytest.param("local", 1, True, 0, id="a client that returns"),
        pytest.param("local", 999, True, 1, id="an event that was never sent"),
        pytest.param("local", 1, False, 1, id="a HEAD"),
        pytest.param("other", 1, True, 1, id="a stranger"),
    ],
)
async def test_only_who_continues_a_stream_gives_it_more_time(
    world: Generations, clock: Clock, owner: str, after: int, *, continues: bool, expired: int
):
    """Who is refused, or only looks, could else keep a bill open for ever."""
    with contextlib.suppress(ServingError):
        await continued_streams(world).find_or_continue(
            owner, "chatcmpl-1", ChunkWire, after, continues=continues
        )
    clock.now_s += 1
    assert await world.suspensions.expire() == expired


@pytest.mark.parametrize("unseen", [False, True])
async def test_a_continued_answer_knows_whether_anybody_had_any_of_it(tmp_path: Path, unseen: bool):
    """If it fails yet, that decides who pays."""
    async with generations(tmp_path) as world:
        stream, serving = await running(world, unseen=unseen)
        stream.cancel(SUSPENDED)
        await serving
        await world.suspensions.drained()
        continued = await continued_streams(world).find_or_continue(
            "local", "chatcmpl-1", ChunkWire, 0, continues=False
        )
        assert continued is not None
        assert continued.unseen is unseen
