"""A child server dies or hangs in mid-answer: it is started again, and its answers go on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import pytest

from app.core import Counts, Delta, Engine, Health
from app.engine.child_server import ChildCommand, ChildServer
from app.engine.http.engine import RemoteEngine
from app.engine.http.pool import RemoteOptions
from app.engine.http.server import Timeouts
from app.engine.supervise import SupervisedEngine
from app.safety.guard.templates import FORMATS
from app.safety.guard.tier import Guard, GuardFailed
from tests.support.false_child import TOKENS
from tests.support.false_sglang import PROMPT_TOKENS, PlainModel, ask, moved, words
from tests.support.sse_client import until

START_S = 30.0


@dataclass
class Small:
    """A second model in a child server, supervised, and what was told of its ends."""

    continues_by_ids: bool
    children: list[ChildServer] = field(default_factory=list)
    engines: list[RemoteEngine] = field(default_factory=list)

    def make(self, on_exit: Callable[[str], None]) -> Engine:
        """An engine with a child, as `engine_factory.child_engine` makes it."""

        def exited(reason: str) -> None:
            engine.child_ended()
            on_exit(reason)

        child = ChildServer(command, on_exit=exited, first_pause_s=0.05)
        options = RemoteOptions(
            start_s=START_S,
            poll_s=0.05,
            stall_s=0.5,
            resume_s=START_S,
            timeouts=Timeouts(poll_s=0.3),
            continues_by_ids=self.continues_by_ids,
        )
        engine = RemoteEngine(options, PlainModel, child)
        self.children.append(child)
        self.engines.append(engine)
        return engine

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the child's process."""
        pid = self.children[-1].pid
        assert pid is not None
        os.kill(pid, number)


def command(port: int) -> ChildCommand:
    """A false SGLang."""
    return ChildCommand([sys.executable, "-m", "tests.support.false_child", str(port)])


@pytest.fixture(params=[False, True], ids=["longer prompt", "ids"])
async def small(request: pytest.FixtureRequest) -> AsyncIterator[tuple[Small, SupervisedEngine]]:
    """One that has started, and that is told of the answer so far in either way."""
    made = Small(request.param)
    supervised = SupervisedEngine("small", made.make)
    await supervised.start()
    await until(lambda: supervised.state == "ready", START_S)
    yield made, supervised
    await supervised.aclose()


def check_whole(deltas: list[Delta]) -> None:
    """Every token and its text once, with true counts."""
    assert [token_id for delta in deltas for token_id in delta.token_ids] == list(range(1, TOKENS + 1))
    assert "".join(delta.text for delta in deltas) == words(range(1, TOKENS + 1))
    assert deltas[-1].counts == Counts(PROMPT_TOKENS, TOKENS, 2)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_the_answers_of_a_child_go_on_when_it_is_back(
    small: tuple[Small, SupervisedEngine], number: signal.Signals
) -> None:
    """Killed or stopped: another process takes its place, under the same engine."""
    made, supervised = small
    engine = made.engines[0]
    asking = [asyncio.create_task(ask(engine, f"r{n}", max_tokens=TOKENS)) for n in range(8)]
    await until(lambda: all(engine.pop_emitted_tokens(f"r{n}") >= 5 for n in range(8)))
    made.signal(number)
    for answer in await asyncio.wait_for(asyncio.gather(*asking), START_S):
        check_whole(answer)
    assert made.children[0].num_starts == 2
    assert len(made.engines) == 1
    assert supervised.num_failures == 1
    assert supervised.state == "ready"
    assert moved(engine) == {"resumed": 8}


async def test_a_child_that_did_not_start_is_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same engine, which then answers; the reason is told meanwhile."""
    serving, states = command, list[str]()

    def failing_first(port: int) -> ChildCommand:
        states.append(supervised.state)
        failing = ChildCommand([sys.executable, "-S", "-c", "raise SystemExit('no memory')"])
        return serving(port) if supervised.num_failures else failing

    monkeypatch.setattr(sys.modules[__name__], "command", failing_first)
    made = Small(continues_by_ids=True)
    supervised = SupervisedEngine("small", made.make)
    try:
        await supervised.start()
        await until(lambda: supervised.state == "ready", START_S)
        check_whole(await ask(made.engines[0], max_tokens=TOKENS))
    finally:
        await supervised.aclose()
    assert states[0] == "starting"
    assert states[-1].startswith("down: SGLang did not start: the process ended with status 1")
    assert made.children[0].pid is None


async def test_a_guard_that_is_away_gives_no_verdict(small: tuple[Small, SupervisedEngine]) -> None:
    """A verdict that is being given when its server dies fails in its time, later ones at once."""
    made, _ = small
    guard = Guard(made.engines[0], FORMATS[0], timeout_s=0.5)
    asked = [{"role": "user", "content": "May I ask?"}]
    judging = asyncio.create_task(guard.score(asked))
    await until(lambda: made.engines[0]._pool.servers[0].num_open > 0)
    made.signal(signal.SIGSTOP)
    with pytest.raises(GuardFailed, match="timeout"):
        await judging
    made.signal(signal.SIGKILL)
    await until(lambda: made.engines[0].health() is Health.STARTING)
    with pytest.raises(GuardFailed, match="error"):
        await guard.score(asked)
    await guard.aclose()
