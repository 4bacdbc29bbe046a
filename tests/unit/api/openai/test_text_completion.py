"""Frames of text completions: valid JSON for any text, and the same text however many events they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.http.sse import PING, PlainSink
from app.api.openai.text_completion import CompletionWire
from app.core import ChatRequest, Counts, Delta
from app.stream.ring import Done, ExtraChunk, Failed, Finished, Opened, Ring
from tests.support.sse_client import SSEParser

HOSTILE = ('"', "\\", "\x00\x1f", "\u2028", "\r\n\r\n", "data: [DONE]\n\n", "id: 9\n", "\U0001f600")
ENTRY = {
    "token": "a",
    "logprob": -0.5,
    "bytes": [97],
    "top_logprobs": [{"token": "b", "logprob": -1.5, "bytes": [98]}],
}


def wire(**fields: Any) -> CompletionWire:
    """The wire of a request to the scripted model."""
    return CompletionWire(ChatRequest("cmpl-1", "local", "scripted", {}, 1_700_000_000, **fields))


def chunk(frame: bytes) -> dict[str, Any]:
    """The chunk of the only event in `frame`."""
    (event,) = SSEParser().feed(frame)
    body: dict[str, Any] = event.json()
    return body


def delta(text: str, choice: int = 0, **fields: Any) -> Delta:
    """A piece of text."""
    return Delta(choice, "text", text, (1,), Counts(3, 1), **fields)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.one_of(st.sampled_from(HOSTILE), st.text(max_size=9))), min_size=1
    )
)
def test_text_is_the_same_in_frames_of_any_size(pieces: list[tuple[int, str]]):
    """A reader that lags gets several events in a frame, and no other text."""
    ring, writer = Ring(1 << 20), wire(n=3)
    spoken = ["", "", ""]
    for choice, text in pieces:
        event_id, track, escaped = ring.append(delta(text, choice))
        (alone,) = chunk(writer.text(event_id, track, escaped))["choices"]
        assert (alone["index"], alone["text"]) == (choice, text)
        spoken[choice] += text
    together, cursor = ["", "", ""], 0
    while cursor < ring.last_id:
        cursor, runs = ring.after(cursor)
        assert isinstance(runs, (list, tuple))
        for choice in chunk(writer.delta(cursor, runs))["choices"]:
            together[choice["index"]] += choice["text"]
    assert together == spoken


def test_control_events_are_text_completion_chunks():
    """The first has the time to retry after, and an empty text for each choice; the last has the reason."""
    writer = wire(n=2, include_usage=True)
    opened = writer.control(1, Opened(2))
    assert b"retry: 1000\n" in opened
    body = chunk(opened)
    empty = {"text": "", "logprobs": None, "finish_reason": None}
    assert (body["id"], body["object"], body["model"]) == ("cmpl-1", "text_completion", "scripted")
    assert (body["usage"], body["choices"]) == (None, [{"index": 0, **empty}, {"index": 1, **empty}])
    (ended,) = chunk(writer.control(2, Finished(1, "stop", "END")))["choices"]
    assert ended == {"index": 1, **empty, "finish_reason": "stop", "matched_stop": "END"}
    usage = chunk(writer.control(3, ExtraChunk("usage", {"total_tokens": 2})))
    assert (usage["choices"], usage["usage"]) == ([], {"total_tokens": 2})


def test_logprobs_are_lists_by_token():
    """Several events in a frame are one list; with no alternatives asked for there are none."""
    ring, writer = Ring(1 << 20, logprobs=True), wire(logprobs=True)
    for text in "ab":
        ring.append(delta(text, logprobs=[ENTRY | {"token": text}]))
    cursor, runs = ring.after(0)
    assert isinstance(runs, (list, tuple))
    (choice,) = chunk(writer.delta(cursor, runs))["choices"]
    assert choice["logprobs"] == {
        "tokens": ["a", "b"],
        "token_logprobs": [-0.5, -0.5],
        "top_logprobs": [{"b": -1.5}, {"b": -1.5}],
    }
    ring.append(delta("c", logprobs=[ENTRY | {"top_logprobs": []}]))
    cursor, runs = ring.after(cursor)
    assert isinstance(runs, (list, tuple))
    assert chunk(writer.delta(cursor, runs))["choices"][0]["logprobs"]["top_logprobs"] is None


class Kept:
    """A connection that keeps what is written to it."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def ready(self) -> bool:
        return True

    def write(self, *frames: bytes) -> None:
        self.sent += frames

    async def caught_up(self) -> None:
        """It never lags."""

    def abort(self) -> None:
        """It cannot be cut."""


@pytest.mark.parametrize("event", [Opened(1), Finished(0, "stop", None), Failed({"error": {}}), Done()])
def test_plain_events_are_data_lines_alone(event: Any):
    """No id, no time to retry after, no comment."""
    sink = Kept()
    plain = PlainSink(sink)
    plain.write(PING)
    plain.write(wire().control(7, event), wire().control(8, event))
    lines = b"".join(sink.sent).decode().split("\n")
    assert [line[:6] for line in lines if line] == ["data: ", "data: "]
    for line in filter(None, lines):
        assert line == "data: [DONE]" or json.loads(line[6:])
