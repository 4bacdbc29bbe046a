"""Frames: valid JSON for any text, one id each, the same text however many events they hold."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.http.sse import PING
from app.api.openai.chat_completion import ChunkWire
from app.core import ChatRequest, Counts, Delta, ToolCall
from app.errors import EngineFailed
from app.stream.ring import ControlEvent, Done, ExtraChunk, Failed, Finished, Opened, Ring, ToolStarted
from tests.support.sse_client import Event, SSEParser, Transcript

HOSTILE = (
    "",
    '"',
    "\\",
    "\x00\x01\x1f\x7f",
    "\u2028\u2029",
    "\r\n\r\n",
    "data: [DONE]\n\n",
    "id: 9\n",
    "\U0001f600",
    "e\u0301",
    "\ufeff",
    "</script>",
)
any_text = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=20))


def request(**fields) -> ChatRequest:
    """A request to the scripted model."""
    return ChatRequest("chatcmpl-1", "local", "scripted", {}, 1_700_000_000, **fields)


def parse(frames: bytes) -> list[Event]:
    """Events of whole frames."""
    parser = SSEParser()
    events = parser.feed(frames)
    assert parser.blank_without_data == 0
    return events


def one(frame: bytes) -> dict[str, Any]:
    """The chunk of the only event in `frame`."""
    (event,) = parse(frame)
    return event.json()


def frames_of(ring: Ring, wire: ChunkWire, cursor: int = 0) -> bytes:
    """All frames after `cursor`."""
    out = b""
    while cursor < ring.last_id:
        cursor, content = ring.after(cursor)
        is_control = isinstance(content, ControlEvent)
        out += wire.control(cursor, content) if is_control else wire.delta(cursor, content)
    return out


def without_surrogates(text: str) -> str:
    """What is left of a text that UTF-8 cannot carry."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


@given(
    pieces=st.lists(st.tuples(st.sampled_from(["reasoning", "text", "tool"]), st.integers(0, 2), any_text)),
    usage=st.booleans(),
)
def test_any_text_makes_the_same_transcript_in_any_framing(pieces, usage):
    """One event a frame, several, or all at once: a client understands the same text."""
    chat = request(n=3, include_usage=usage)
    ring, wire = Ring(10**9), ChunkWire(chat)
    ring.append_control(Opened(3))
    expected: dict[tuple[int, str], str] = {}
    singly = wire.control(1, Opened(3))
    for channel, choice, text in pieces:
        tool = ToolCall(0) if channel == "tool" else None
        singly += wire.text(*ring.append(Delta(choice, channel, text, (1,), Counts(), tool=tool)))
        name = "tool0" if channel == "tool" else channel
        expected[choice, name] = expected.get((choice, name), "") + without_surrogates(text)
    ring.append_control(Done())
    singly += wire.control(ring.last_id, Done())
    transcripts = []
    for frames in (singly, frames_of(ring, wire), frames_of(ring, wire, 1)):
        transcript = Transcript()
        for event in parse(frames):
            transcript.add(event)
        transcript.check_ids()
        assert transcript.done
        transcripts.append({track: text for track, text in transcript.text.items() if text})
    assert transcripts == [{track: text for track, text in expected.items() if text}] * 3


@pytest.mark.parametrize("text", ["\ud800", "a\udc00\ud800b"])
def test_lone_surrogate_costs_itself_only(text: str):
    """Half a surrogate pair, which no UTF-8 can hold, is replaced, and the frame stays valid."""
    ring, wire = Ring(10**9), ChunkWire(request())
    appended = ring.append(Delta(0, "text", text, (1,), Counts()))
    content = one(wire.text(*appended))["choices"][0]["delta"]["content"]
    assert content.replace("?", "") == "".join(c for c in text if c.isascii())


def test_opening_holds_roles_and_retry():
    """The first event has the role of every choice, and the only `retry:` of the stream."""
    frame = ChunkWire(request(n=3)).control(1, Opened(3))
    parser = SSEParser()
    (event,) = parser.feed(frame)
    assert parser.retries == [(1000, True)]
    assert event.id == 1
    chunk = event.json()
    assert [c["delta"]["role"] for c in chunk["choices"]] == ["assistant"] * 3
    assert [c["index"] for c in chunk["choices"]] == [0, 1, 2]
    assert (chunk["id"], chunk["created"], chunk["model"]) == ("chatcmpl-1", 1_700_000_000, "scripted")


def test_no_other_frame_has_a_retry():
    """`retry:` comes once."""
    wire = ChunkWire(request())
    events = [
        ToolStarted(0, ToolCall(0, "i", "n")),
        Finished(0, "stop", None),
        ExtraChunk("usage", {}),
        Done(),
    ]
    frames = b"".join(wire.control(i, event) for i, event in enumerate(events, start=2))
    assert b"retry" not in frames


def test_heartbeat_between_frames_changes_nothing():
    """A comment line without a blank line is no event, wherever it stands."""
    wire = ChunkWire(request())
    frames = [wire.control(1, Opened(1)), wire.control(2, Done())]
    parser = SSEParser()
    events = parser.feed(PING + frames[0] + PING + PING + frames[1] + PING)
    assert [e.id for e in events] == [1, 2]
    assert (parser.comments, parser.blank_without_data) == (4, 0)


def test_several_choices_share_a_frame():
    """A frame over several choices holds each once, with all its channels."""
    ring, wire = Ring(10**9), ChunkWire(request(n=2))
    for choice in (0, 1):
        ring.append(Delta(choice, "reasoning", "hm", (1,), Counts()))
    for choice in (0, 1):
        ring.append(Delta(choice, "text", f"answer {choice}", (1,), Counts()))
    ring.append(Delta(0, "tool", '{"a":', (1,), Counts(), tool=ToolCall(0)))
    ring.append(Delta(0, "tool", '{"b":', (1,), Counts(), tool=ToolCall(1)))
    last_id, parts = ring.after(0)
    chunk = one(wire.delta(last_id, parts))
    assert last_id == 6
    assert [c["index"] for c in chunk["choices"]] == [0, 1]
    first = chunk["choices"][0]["delta"]
    assert (first["reasoning_content"], first["content"]) == ("hm", "answer 0")
    assert [(c["index"], c["function"]["arguments"]) for c in first["tool_calls"]] == [
        (0, '{"a":'),
        (1, '{"b":'),
    ]
    assert all(c["finish_reason"] is None for c in chunk["choices"])


def test_usage_is_null_until_it_comes():
    """With include_usage every chunk but the last has `usage: null`; without it, none has the field."""
    for asked in (True, False):
        ring, wire = Ring(10**9), ChunkWire(request(include_usage=asked))
        ring.append_control(Opened(1))
        ring.append(Delta(0, "text", "a", (1,), Counts()))
        ring.append_control(Finished(0, "stop", None))
        chunks = [event.json() for event in parse(frames_of(ring, wire))]
        assert [("usage" in chunk, chunk.get("usage")) for chunk in chunks] == [(asked, None)] * 3
    assert one(wire.control(9, ExtraChunk("usage", {"total_tokens": 3}))) == {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1_700_000_000,
        "model": "scripted",
        "choices": [],
        "usage": {"total_tokens": 3},
    }


def test_continuous_usage_has_the_newest_counts():
    """With continuous usage a frame has the counts at its last event."""
    chat = request(include_usage=True, continuous_usage=True)
    ring, wire = Ring(10**9, counts=True), ChunkWire(chat)
    for number in (1, 2, 3):
        ring.append(Delta(0, "text", "a", (1,), Counts(7, number)))
    for cursor in (0, 2):
        last_id, parts = ring.after(cursor)
        assert one(wire.delta(last_id, parts))["usage"]["completion_tokens"] == 3


def test_continuous_usage_does_not_depend_on_framing():
    """A frame of one choice's text has the counts of all choices, as one that holds the text of all has."""
    ring, wire = Ring(10**9, counts=True), ChunkWire(request(n=2, include_usage=True, continuous_usage=True))
    for number in (1, 2, 3):
        for choice in (0, 1):
            ring.append(Delta(choice, "text", "a", (1,), Counts(7, number)))
    for cursor in (0, 4, 5):
        usage = one(wire.delta(*ring.after(cursor)))["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (7, 6)


def test_logprobs_are_with_their_text():
    """Logprobs of coalesced events are one list; an event without has none."""
    ring, wire = Ring(10**9, logprobs=True), ChunkWire(request(logprobs=True))
    for token in "ab":
        ring.append(Delta(0, "text", token, (1,), Counts(), logprobs=[{"token": token, "logprob": -1.0}]))
    ring.append_control(Finished(0, "stop", None))
    ring.append(Delta(0, "text", "c", (1,), Counts()))
    (choice,) = one(wire.delta(*ring.after(0)))["choices"]
    assert [entry["token"] for entry in choice["logprobs"]["content"]] == ["a", "b"]
    assert choice["delta"] == {"reasoning_content": None, "content": "ab"}
    (choice,) = one(wire.delta(*ring.after(3)))["choices"]
    assert "logprobs" not in choice


def test_end_of_a_choice_names_its_reason():
    """The finish reason has a chunk of its own, with what matched, which is null where no stop did."""
    wire = ChunkWire(request())
    (choice,) = one(wire.control(2, Finished(1, "stop", "END")))["choices"]
    end = {"index": 1, "delta": {"reasoning_content": None}, "finish_reason": "stop", "matched_stop": "END"}
    assert choice == end
    (choice,) = one(wire.control(2, Finished(0, "abort", None)))["choices"]
    assert choice["finish_reason"] == "stop"
    (choice,) = one(wire.control(2, Finished(0, "length", None)))["choices"]
    assert choice["matched_stop"] is None


@pytest.mark.parametrize("logprobs", [False, True])
def test_every_delta_has_reasoning_content(*, logprobs: bool):
    """Clients of SGLang read the field of every chunk; it is null where the chunk has no reasoning."""
    wire, ring = ChunkWire(request(logprobs=logprobs)), Ring(10**9, logprobs=logprobs)
    entries = [{"token": "a", "logprob": -1.0}] if logprobs else None
    chunks = [one(wire.control(1, Opened(1))), one(wire.control(2, ToolStarted(0, ToolCall(0, "i", "n"))))]
    for number, channel in enumerate(("text", "reasoning")):
        ring.append(Delta(0, channel, "a", (1,), Counts(), logprobs=entries))
        chunks.append(one(wire.delta(*ring.after(number))))
    chunks.append(one(wire.control(9, Finished(0, "stop", None))))
    fields = [chunk["choices"][0]["delta"]["reasoning_content"] for chunk in chunks]
    assert fields == [None, None, None, "a", None]


def test_error_and_end():
    """An error is the usual body as an event; the end is [DONE]; both have ids."""
    wire = ChunkWire(request())
    error, done = parse(wire.control(5, Failed(EngineFailed("broke").as_body())) + wire.control(6, Done()))
    assert (error.id, done.id, done.data) == (5, 6, "[DONE]")
    assert json.loads(error.data)["error"]["code"] == "engine_failed"
