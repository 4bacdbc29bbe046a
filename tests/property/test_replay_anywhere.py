"""Replay from the store is the live stream, wherever it was checkpointed, cut and resumed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.api.openai.chat_completion import ChunkWire
from app.core import Counts, Delta, ToolCall
from app.stream.replay import END_ID, replayed
from app.stream.token_stream import TokenStream
from tests.support.replays import BIG, OPENAI_USAGE, asked, frames, opened, stored, understood

text = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
counts = st.builds(Counts, *[st.integers(0, 10**6)] * 4)
logprobs = st.one_of(st.none(), st.lists(st.builds(dict, token=text, logprob=st.floats(-50, 0)), max_size=2))
deltas = st.lists(
    st.one_of(
        st.builds(
            lambda choice, channel, piece, so_far, entries: Delta(
                choice, channel, piece, (1,), so_far, logprobs=entries
            ),
            st.integers(0, 1),
            st.sampled_from(["reasoning", "text"]),
            text,
            counts,
            logprobs,
        ),
        st.builds(
            lambda index, name, piece: Delta(
                0, "tool", piece, (1,), Counts(), tool=ToolCall(index, f"call_{index}", name)
            ),
            st.integers(0, 1),
            st.sampled_from([None, "weather"]),
            text,
        ),
    ),
    max_size=30,
)
requests = st.builds(
    asked,
    n=st.just(2),
    include_usage=st.booleans(),
    continuous_usage=st.booleans(),
    logprobs=st.booleans(),
)


class Checkpoints:
    """The segments of a live stream, taken now and then."""

    def __init__(self, stream: TokenStream) -> None:
        self.segments: list[bytes] = []
        self.last_id = 0
        self._stream = stream

    def take(self) -> None:
        """Keep what is new."""
        news = self._stream.dump(self.last_id)
        if news is not None:
            self.segments.append(news[1])
            self.last_id = self._stream.last_id


def in_a_loop(check: Callable[..., Coroutine[Any, Any, None]]) -> Callable[[], None]:
    """A test of many examples, each in a loop of its own.

    Hypothesis ends an example by an exception that is no `Exception`, and a loop that examples
    share does not survive it.
    """

    @given(request=requests, said=deltas, data=st.data())
    def test(request, said, data):
        asyncio.run(check(request, said, data))

    test.__doc__, test.__name__ = check.__doc__, check.__name__
    return test


def generate(stream: TokenStream, said: list[Delta], checkpoints: Checkpoints, data: st.DataObject) -> None:
    """Release deltas, with checkpoints between them."""
    for delta in said:
        if data.draw(st.integers(0, 3)) == 0:
            checkpoints.take()
        stream.append(delta)


@in_a_loop
async def test_ended_stream_is_the_same_from_every_cursor(request, said, data):
    """Frame for frame, from every cursor, whatever the segments were."""
    live = opened(request)
    checkpoints = Checkpoints(live)
    generate(live, said, checkpoints, data)
    for choice in range(2):
        live.append(Delta(choice, "text", "", (), Counts(), "stop"))
    if request.include_usage:
        live.extra_chunk("usage", OPENAI_USAGE)
    live.close()
    checkpoints.take()
    row = stored(request, checkpoints.segments)
    for after in range(live.last_id + 1):
        assert frames(replayed(row, ChunkWire, BIG, after), after) == frames(live, after)


@in_a_loop
async def test_any_client_of_a_dead_process_reads_a_consistent_end(request, said, data):
    """What it had and what it gets are the stream as far as it is known, then the error."""
    live = opened(request)
    checkpoints = Checkpoints(live)
    generate(live, said, checkpoints, data)
    sent = frames(live)
    at = data.draw(st.integers(0, len(sent)))
    client = understood(sent[:at])
    row = stored(request, checkpoints.segments, finish="interrupted", reconciled=True)
    after = client.last_id
    known = understood(frames(live)[:at]).text if after > checkpoints.last_id else None
    understood(frames(replayed(row, ChunkWire, BIG, after), after), client)
    assert client.done
    assert [error["code"] for error in client.errors] == ["interrupted"]
    assert client.errors[0]["last_event_id"] == checkpoints.last_id
    if known is None:
        known = understood(frames(replayed(row, ChunkWire, BIG, 0))).text
    assert client.text == known
    assert client.ids[-2:] == [END_ID, END_ID + 1]
