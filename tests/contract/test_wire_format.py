"""The bytes of a stream: what parsers of server-sent events see, OpenAI's SDKs first among them.

HTML living standard, section 9.2 "Server-sent events"; docs/resume.md has the rules in words.
"""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from app.core import ChatRequest
from app.engine.scripted.engine import Script, scripted_text
from app.stream.registry import StreamRegistry
from app.stream.token_stream import TokenStream
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Connection, Response, SSEParser, open_stream, until

BLOCK = re.compile(rb"id: (?P<id>[0-9]+)\n(?P<retry>retry: [0-9]+\n)?data: (?P<data>[^\n]+)", re.ASCII)
WORDS = "".join(scripted_text(0, 0, 12))


def blocks(body: bytes) -> list[re.Match[bytes]]:
    """The event blocks of a whole stream, each matched against the one form there is."""
    assert body.endswith(b"\n\n")
    found = [BLOCK.fullmatch(block) for block in body.removesuffix(b"\n\n").split(b"\n\n")]
    assert None not in found, body
    return [match for match in found if match is not None]


def text_of(body: bytes, choice: int = 0) -> str:
    """The answer text in a stream."""
    text = ""
    for match in blocks(body):
        if match["data"] != b"[DONE]":
            for entry in json.loads(match["data"]).get("choices", ()):
                text += entry["delta"].get("content", "") if entry["index"] == choice else ""
    return text


async def finished(served: Served, **parameters: Any) -> tuple[str, Response]:
    """A stream's id and its whole first answer."""
    answer = await served.post(chat(**parameters))
    assert answer.status == 200
    return answer.headers["x-request-id"], answer


async def test_events_have_one_form(serve: Serve):
    """Every block is an integer id, then data; only the first has a retry; nothing is named."""
    _, answer = await finished(
        await serve(Script(tokens=12, rate=500)), stream_options={"include_usage": True}
    )
    found = blocks(answer.body)
    assert [int(m["id"]) for m in found] == list(range(1, len(found) + 1))
    assert [m["retry"] is not None for m in found] == [True] + [False] * (len(found) - 1)
    assert [m["data"] == b"[DONE]" for m in found] == [False] * (len(found) - 1) + [True]
    assert b"event:" not in answer.body
    assert b"\r" not in answer.body


async def test_headers_of_a_stream(serve: Serve):
    """A stream is never cached or held back by a proxy, and its id is in a header."""
    stream_id, answer = await finished(await serve(Script(tokens=1)))
    assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert answer.headers["cache-control"] == "no-store"
    assert answer.headers["x-accel-buffering"] == "no"
    assert json.loads(blocks(answer.body)[0]["data"])["id"] == stream_id


@pytest.mark.parametrize("version", ["/api", "/v1"])
async def test_chunks_are_openais(serve: Serve, version: str):
    """Each chunk, of text, reasoning, tools and usage, is one that OpenAI's own types accept."""
    served = await serve(Script(tokens=6, reasoning=2, tool="get_weather", rate=500))
    body = chat(n=2, stream_options={"include_usage": True})
    answer = await served.call("POST", f"{version}/chat/completions", body)
    chunks = [
        ChatCompletionChunk.model_validate_json(m["data"], strict=False) for m in blocks(answer.body)[:-1]
    ]
    assert {c.object for c in chunks} == {"chat.completion.chunk"}
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    first = chunks[0].choices[0].delta
    assert (first.role, first.content) == ("assistant", "")
    assert all(c.usage is None for c in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12
    calls = [t for c in chunks for e in c.choices if e.index == 1 for t in e.delta.tool_calls or ()]
    assert (calls[0].type, calls[0].function and calls[0].function.name) == ("function", "get_weather")
    assert calls[0].id
    assert "".join((t.function and t.function.arguments) or "" for t in calls) == '{"city": "Paris"}'
    assert {e.finish_reason for c in chunks for e in c.choices} == {None, "tool_calls"}


async def test_one_piece_is_openais(serve: Serve):
    """The answer in one piece is a chat.completion that OpenAI's own types accept, with usage."""
    served = await serve(Script(tokens=5, tool="get_weather"))
    answer = ChatCompletion.model_validate((await served.post(chat(stream=False, n=2))).json(), strict=False)
    assert [c.finish_reason for c in answer.choices] == ["tool_calls", "tool_calls"]
    assert answer.choices[0].message.content == "".join(scripted_text(0, 0, 5))
    assert answer.usage is not None
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + 10


async def test_heartbeat_is_a_line_and_no_event(serve: Serve):
    """A heartbeat is a comment without a blank line, before, between and after tokens."""
    served = await serve(Script(tokens=2, prefill_s=0.3, rate=5), heartbeat_s=0.03)
    _, answer = await finished(served)
    assert b": ping\n\n" not in answer.body
    events = re.split(rb"(?<=\n\n)", answer.body)
    pings = [event.count(b": ping\n") for event in events]
    assert pings[0] == 0
    assert pings[1] >= 2, "the model was silent for 300 ms"
    assert pings[2] >= 1, "200 ms between tokens"
    without = answer.body.replace(b": ping\n", b"")
    assert [int(m["id"]) for m in blocks(without)] == list(range(1, len(blocks(without)) + 1))


async def test_heartbeats_never_make_a_parser_dispatch(serve: Serve):
    """A parser of the standard sees no blank line without data, however many heartbeats flow."""
    served = await serve(Script(tokens=3, rate=10), heartbeat_s=0.02)
    _, answer = await finished(served)
    parser = SSEParser()
    parser.feed(answer.body)
    assert parser.comments >= 3
    assert parser.blank_without_data == 0
    assert parser.retries == [(1000, True)]


async def test_done_has_an_id_and_nothing_follows(serve: Serve):
    """Attaching after [DONE] is 204 without a body, which ends an EventSource."""
    served = await serve(Script(tokens=12))
    stream_id, answer = await finished(served)
    last_id = int(blocks(answer.body)[-1]["id"])
    path = f"/api/chat/completions/{stream_id}"
    ended = await served.call("GET", path, last_event_id=str(last_id))
    assert (ended.status, ended.body) == (204, b"")
    assert (await served.call("GET", f"{path}?last_event_id={last_id}")).status == 204


async def test_replay_from_every_position(serve: Serve):
    """After any id, by header or query, comes exactly what followed it."""
    served = await serve(Script(tokens=12, rate=400))
    stream_id, answer = await finished(served)
    path = f"/v1/chat/completions/{stream_id}"
    events = blocks(answer.body)
    for position, event in enumerate(events[:-1], start=1):
        after = event["id"].decode()
        by_header = await served.call("GET", path, last_event_id=after, accept="text/event-stream")
        by_query = await served.call("GET", f"{path}?last_event_id={after}", accept="text/event-stream")
        assert by_header.body == by_query.body
        seen = b"".join(m[0] + b"\n\n" for m in events[:position])
        assert text_of(seen) + text_of(by_header.body) == WORDS
        ids = [int(m["id"]) for m in blocks(by_header.body)]
        assert ids == sorted(set(ids))
        assert ids[0] > position
        assert ids[-1] == len(events)
        assert b"retry:" not in by_header.body


async def test_the_header_beats_the_query(serve: Serve):
    """A browser repeats the query of its first request: the header it adds is the newer position."""
    served = await serve(Script(tokens=12))
    stream_id, answer = await finished(served)
    last_id = len(blocks(answer.body))
    path = f"/api/chat/completions/{stream_id}?last_event_id=1"
    assert (await served.call("GET", path, last_event_id=str(last_id))).status == 204


async def test_a_late_reader_gets_frames_of_several_events(serve: Serve):
    """What a reader lags behind comes in one frame, whose id is that of its last event."""
    served = await serve(Script(tokens=12))
    stream_id, first = await finished(served)
    late = await served.call("GET", f"/api/chat/completions/{stream_id}")
    assert len(blocks(late.body)) == 4, "opened, all text, finished, [DONE]"
    assert text_of(late.body) == WORDS
    assert blocks(late.body)[1]["id"] == blocks(first.body)[12]["id"]


@pytest.mark.parametrize("position", ["x", "-1", "1.5", "٣", "9" * 30, "0x1", "1 2"])
async def test_positions_that_are_no_number(serve: Serve, position: str):
    """A Last-Event-ID that is no id is 400, by header and by query, for GET and POST."""
    served = await serve(Script(tokens=2))
    stream_id, _ = await finished(served)
    refusal = (400, "invalid_last_event_id", "Last-Event-ID")
    path = f"/api/chat/completions/{stream_id}"
    quoted = position.replace(" ", "%20") if position.isascii() else "%D9%A3"
    assert (await served.call("GET", f"{path}?last_event_id={quoted}")).refusal() == refusal
    if position.isascii():
        assert (await served.call("GET", path, last_event_id=position)).refusal() == refusal
        assert (await served.post(chat(), last_event_id=position)).refusal() == refusal


async def test_positions_never_sent(serve: Serve):
    """A Last-Event-ID beyond what was ever sent is 400 on a live and on a finished stream."""
    served = await serve(Script(tokens=1000, rate=50))
    async with await served.open(chat()) as stream:
        await stream.read_events(2)
        path = f"/api/chat/completions/{stream.id}"
        answer = await served.call("GET", path, last_event_id="500")
        assert answer.refusal() == (400, "invalid_last_event_id", "Last-Event-ID")
        await served.call("DELETE", path)
        await stream.to_end()
        beyond = str(stream.transcript.last_id + 1)
    answer = await served.call("GET", path, last_event_id=beyond)
    assert answer.refusal() == (400, "invalid_last_event_id", "Last-Event-ID")


async def test_positions_no_longer_held(serve: Serve):
    """A position that has left the ring is 410, and the message has the earliest one that works."""
    served = await serve(Script(tokens=2000), stream_bytes=4096)
    stream_id, _ = await finished(served)
    path = f"/api/chat/completions/{stream_id}"
    answer = await served.call("GET", path, last_event_id="1")
    assert answer.refusal() == (410, "events_expired", "Last-Event-ID")
    earliest = answer.error()["message"].rpartition("Last-Event-ID ")[2].rstrip(".")
    assert (await served.call("GET", path, last_event_id=earliest)).status == 200


async def test_a_position_without_a_generation_starts_none(serve: Serve):
    """POST with a Last-Event-ID and nothing to attach to is 400 before anything is generated."""
    served = await serve(Script(tokens=1000, rate=50))
    for headers in ({}, {"idempotency_key": "fresh"}):
        answer = await served.post(chat(), last_event_id="7", **headers)
        assert answer.refusal() == (400, "invalid_last_event_id", "Last-Event-ID")
    assert served.live() == []


async def test_unknown_and_foreign_streams_look_the_same(serve: Serve):
    """Someone else's stream is 404 in the same words as one that never was."""
    served = await serve(Script())
    request = ChatRequest("chatcmpl-foreign", "someone else", "scripted", {}, 0)
    streams: StreamRegistry = served.runtime.streams
    foreign: TokenStream = streams.create(request, None)  # type: ignore[arg-type]  # never written to
    foreign.open(1)
    for method in ("GET", "DELETE"):
        answers = [
            await served.call(method, f"/api/chat/completions/{stream_id}")
            for stream_id in ("chatcmpl-foreign", "chatcmpl-unknown")
        ]
        assert [a.refusal() for a in answers] == [(404, "stream_not_found", None)] * 2
        messages = [a.error()["message"].replace("foreign", "unknown") for a in answers]
        assert messages[0] == messages[1]
    streams._live.clear()


async def test_an_error_after_the_first_byte_is_an_event(serve: Serve):
    """A generation that breaks ends in an error event with the usual body, then [DONE]."""
    served = await serve(Script(tokens=12, fault="fail", fault_after=4))
    _, answer = await finished(served)
    *_, error, done = blocks(answer.body)
    assert json.loads(error["data"])["error"]["code"] == "engine_failed"
    assert done["data"] == b"[DONE]"
    assert text_of(answer.body) == "".join(scripted_text(0, 0, 4))


async def test_the_same_key_resumes(serve: Serve):
    """POST again with its Idempotency-Key and a Last-Event-ID goes on after it; at the end, 204."""
    served = await serve(Script(tokens=12, rate=100))
    body = chat()
    async with await served.open(body, headers={"idempotency-key": "k"}) as stream:
        await stream.read_events(5)
    seen = stream.transcript
    again = await served.open(body, headers={"idempotency-key": "k"}, after=seen.last_id)
    async with again:
        rest = await again.to_end()
    assert again.id == stream.id
    assert seen.content() + rest.content() == WORDS
    ended = await served.post(body, idempotency_key="k", last_event_id=str(rest.last_id))
    assert ended.status == 204


class EventSource:
    """A WHATWG EventSource without its timer: reconnects at once, ends by 204 or an error status."""

    def __init__(self, port: int, path: str) -> None:
        self._port = port
        self._path = path
        self._last_event_id = ""
        self.data: list[str] = []
        self.connections = 0

    async def connect(self, cut_after: int | None) -> bool:
        """Read one connection until `cut_after` events or its end; whether to connect again."""
        self.connections += 1
        headers = {"accept": "text/event-stream", "cache-control": "no-store"}
        if self._last_event_id:
            headers["last-event-id"] = self._last_event_id
        async with await Connection.to(self._port) as connection:
            await connection.request("GET", self._path, None, headers)
            head = await connection.head()
            if head.status != 200 or not head.headers["content-type"].startswith("text/event-stream"):
                assert head.status == 204
                return False
            parser = SSEParser()
            events = 0
            async for piece in connection.pieces(head, lambda: 40):
                for event in parser.feed(piece):
                    self._last_event_id = str(event.id)
                    self.data.append(event.data)
                    events += 1
                if cut_after is not None and events >= cut_after:
                    break
        return True


async def test_event_source_gets_everything_and_ends(serve: Serve):
    """An EventSource that keeps losing its connection receives all text once, and is ended by 204."""
    served = await serve(Script(tokens=40, rate=200), heartbeat_s=0.02)
    async with await served.open(chat()) as stream:
        await stream.read_events(1)
        source = EventSource(served.port, f"/api/chat/completions/{stream.id}")
    cuts = iter([1, 3, 2, 7, 5])
    while await source.connect(next(cuts, None)):
        pass
    assert source.connections == 7
    chunks = [json.loads(data) for data in source.data[:-1]]
    assert source.data[-1] == "[DONE]"
    text = "".join(e["delta"].get("content", "") for c in chunks for e in c["choices"])
    assert text == "".join(scripted_text(0, 0, 40))


async def test_head_tells_the_type_and_follows_nothing(serve: Serve):
    """HEAD on a live stream answers at once and leaves no reader behind."""
    served = await serve(Script(tokens=1000, rate=50))
    async with await served.open(chat()) as stream:
        async with await Connection.to(served.port) as connection:
            await connection.request("HEAD", f"/api/chat/completions/{stream.id}")
            head = await connection.head()
        assert head.status == 200
        assert head.headers["content-type"].startswith("text/event-stream")
        assert len(served.stream(stream.id).readers) == 1


async def test_two_readers_of_one_stream_see_the_same_events(serve: Serve):
    """A second reader that attaches at the start receives the same ids and text as the first."""
    served = await serve(Script(tokens=12, rate=100))
    first = await served.open(chat())
    async with first, await open_stream(served.port, stream_id=first.id) as second:
        seen = [await s.to_end() for s in (first, second)]
    assert seen[0].content() == seen[1].content() == WORDS
    assert set(seen[1].ids) <= set(seen[0].ids)
    await until(lambda: not served.live())
