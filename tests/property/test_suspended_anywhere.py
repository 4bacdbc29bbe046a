"""Any answer, cut at any of its deltas and as often as one likes, goes on to the same text."""

from __future__ import annotations

import asyncio
import dataclasses
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from app.core import ChatRequest, Delta, Prompt
from app.engine.scripted.engine import Script, ScriptedEngine
from app.safety.session.session import AnswerScreen
from app.safety.verdict import Verdict
from app.store.suspensions import ids
from app.stream.token_stream import SUSPENDED, TokenStream
from tests.support.generations import MODEL, Generations, HandSession, asked, conversing, generations
from tests.support.replays import frames, understood
from tests.support.sse_client import Transcript


class CutEngine(ScriptedEngine):
    """Has its stream suspended after so many deltas; hands over in pieces of `joined` deltas."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, name=MODEL)
        self.joined = 1
        self._cut: Callable[[], None] = lambda: None
        self._cut_after = -1

    def cut_after(self, num_deltas: int, cut: Callable[[], None]) -> None:
        """Call `cut` after that delta of the next generation; never for a negative number."""
        self._cut_after, self._cut = num_deltas, cut

    def generate(self, rid: str, prompt: Prompt) -> AsyncIterator[Delta]:
        """See Engine."""
        return self._joined(super().generate(rid, prompt))

    async def _joined(self, deltas: AsyncIterator[Delta]) -> AsyncIterator[Delta]:
        held: list[Delta] = []
        number = 0
        async for delta in deltas:
            if number == self._cut_after:
                self._cut()
            number += 1
            held.append(delta)
            if len(held) >= self.joined:
                for piece in _pieces(held):
                    yield piece
                held = []
        for piece in _pieces(held):
            yield piece


def _pieces(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one track as one delta."""
    pieces: list[Delta] = []
    for delta in deltas:
        last = next((piece for piece in reversed(pieces) if piece.choice == delta.choice), None)
        alike = last is not None and last.finish_reason is None and last.channel == delta.channel
        if last is None or not alike or delta.tool is not None or delta.finish_reason is not None:
            pieces.append(delta)
            continue
        joined = last._replace(
            text=last.text + delta.text, token_ids=(*last.token_ids, *delta.token_ids), counts=delta.counts
        )
        pieces[pieces.index(last)] = joined
    return pieces


class LaggingScreen:
    """Holds the last deltas of each choice, until the choice ends."""

    in_review = False

    def __init__(self, lag: int) -> None:
        self.halted: Verdict | None = None
        self._lag = lag
        self._held: dict[int, list[Delta]] = {}

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """See AnswerScreen."""
        held = self._held.setdefault(delta.choice, [])
        held.append(delta)
        keep = 0 if delta.finish_reason is not None else self._lag
        released, held[:] = held[: len(held) - keep], held[len(held) - keep :]
        return released

    async def review(self) -> Sequence[Delta]:
        """See AnswerScreen."""
        return ()

    def take_releasable(self) -> Sequence[Delta]:
        """See AnswerScreen."""
        return ()


class LaggingCheck(HandSession):
    """Safety whose screen lags behind."""

    def __init__(self, request_id: str, lag: int) -> None:
        super().__init__(request_id)
        self._lag = lag

    def open_screen(self) -> AnswerScreen:
        """See SafetySession."""
        return LaggingScreen(self._lag)


@dataclasses.dataclass(frozen=True)
class Case:
    """An answer, and where it is cut."""

    script: Script
    body: Mapping[str, Any]
    fields: Mapping[str, Any]
    stored: bool
    lag: int
    cuts: Sequence[int]
    joined: Sequence[int]

    def request(self) -> ChatRequest:
        """The request of the answer."""
        made = (conversing if self.stored else asked)(include_usage=True, **self.fields)
        return dataclasses.replace(made, body={**made.body, **self.body})


cases = st.builds(
    Case,
    script=st.builds(
        Script,
        tokens=st.integers(1, 24),
        seed=st.integers(0, 5),
        reasoning=st.sampled_from((0, 0, 4)),
        tool=st.sampled_from(("", "", "weather")),
        finish=st.sampled_from(("stop", "length")),
    ),
    body=st.sampled_from(({}, {}, {"stop": ["reader"]}, {"seed": 3})),
    fields=st.fixed_dictionaries(
        {
            "n": st.integers(1, 3),
            "continuous_usage": st.booleans(),
            "max_tokens": st.sampled_from((None, 7, 20)),
        }
    ),
    stored=st.booleans(),
    lag=st.integers(0, 5),
    cuts=st.lists(st.integers(0, 60), max_size=3),
    joined=st.lists(st.integers(1, 9), min_size=4, max_size=4),
)


async def answered(world: Generations, case: Case, engine: CutEngine, cuts: Sequence[int]) -> Transcript:
    """What a client has of the answer that returns after each cut, and the row of its request."""
    stream = world.stream(case.request())
    serving = None
    transcript, last_id = Transcript(), 0
    for cut, joined in zip((*cuts, -1), case.joined, strict=False):
        engine.joined = joined
        if serving is None:
            serving = world.begin(stream)
        else:
            stream, serving = await world.continue_()
        engine.cut_after(cut, lambda stream=stream: stream.cancel(SUSPENDED))  # type: ignore[misc]
        await serving
        await world.suspensions.drained()
        understood(sent_until(stream, last_id), transcript)
        last_id = stream.last_id
        if not stream.suspended:
            break
    transcript.check_ids()
    return transcript


def sent_until(stream: TokenStream, after: int) -> list[bytes]:
    """The frames of a stream after an event, suspended or not."""
    if not stream.suspended:
        return frames(stream, after)
    sent, cursor = [], after
    while cursor != stream.last_id:
        cursor, frame = stream.frame_after(cursor)
        sent.append(frame)
    return sent


async def outcome(case: Case, cuts: Sequence[int]) -> tuple[Transcript, Mapping[str, Any], list[Any]]:
    """The transcript of an answer with these cuts, its row, and its conversation's messages."""
    engine = CutEngine(case.script)
    await engine.start()
    with tempfile.TemporaryDirectory() as directory:
        async with generations(
            Path(directory),
            session_of=lambda request, _key: LaggingCheck(request.request_id, case.lag),
            engine=engine,
        ) as world:
            transcript = await answered(world, case, engine, cuts)
            row = await world.row()
            messages = await world.database.read(
                lambda c: c.execute("SELECT role, text, body, status, answer_ids FROM messages").fetchall()
            )
            assert await world.database.read(ids) == {}
            assert not world.balance.differs
            assert row is not None
            billed = {name: value for name, value in row.items() if "tokens" in name or "cost" in name}
            return transcript, billed | {"outcome": row["outcome"], "state": row["state"]}, messages


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(case=cases)
def test_a_suspended_answer_goes_on_to_the_same_text(case: Case) -> None:
    """Its text, ends, tool calls, usage, bill and messages are those of an answer that nobody cut."""
    whole, row, messages = asyncio.run(outcome(case, ()))
    resumed, resumed_row, resumed_messages = asyncio.run(outcome(case, case.cuts))
    assert resumed.text == whole.text
    assert resumed.finish_reasons == whole.finish_reasons
    assert (resumed.usage, resumed.errors, resumed.done) == (whole.usage, [], True)
    assert resumed_row == row
    assert resumed_messages == messages
