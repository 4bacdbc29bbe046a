"""Events as server-sent frames of OpenAI chunks, and the response that sends them.

    id: 7
    data: {"id":"chatcmpl-…","object":"chat.completion.chunk",…}

What clients' parsers decide (checked against OpenAI's SDKs, tests/e2e): ids on data events
only; a heartbeat is a comment line without a blank line after it; `retry:` stands inside the
first data event. HTML living standard, section 9.2, "Server-sent events".
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson
from starlette.types import Receive, Scope, Send

from app.api.http.client import Client
from app.api.http.plain_events import PlainSink
from app.core import ChatRequest, known_finish
from app.errors import ReplayExpired
from app.stream.reader import FrameSink, Reader
from app.stream.ring import (
    ControlEvent,
    Done,
    Failed,
    Finished,
    Notice,
    Opened,
    TextRun,
    TextTrack,
    ToolStarted,
)
from app.stream.token_stream import usage_of

PING = b": ping\n"
CONNECTION = "tokenring.connection"
"""The ASGI extension under which the server hands out the request's `FrameSink`."""
RETRY_MS = 1000
_FIELD = {"text": b'"content"', "reasoning": b'"reasoning_content"'}


class ChunkWire:
    """Writes the events of one stream as `chat.completion.chunk` frames."""

    OBJECT = "chat.completion.chunk"

    def __init__(self, request: ChatRequest) -> None:
        head = {
            "id": request.request_id,
            "object": self.OBJECT,
            "created": request.created_at_unix_s,
            "model": request.model,
        }
        self._head = orjson.dumps(head)[:-1] + b',"choices":['
        # OpenAI: with include_usage every chunk but the usage chunk has `"usage": null`.
        self._tail = b'],"usage":null}\n\n' if request.include_usage else b"]}\n\n"
        # Said once, in the first chunk.
        self._opening_tail = self._tail
        if request.conversation_id is not None:
            conversation = {"conversation_id": request.conversation_id, "message_id": request.message_id}
            self._opening_tail = b"]," + orjson.dumps(conversation)[1:-1] + self._tail[1:]
        self._closing = b'"},"finish_reason":null}' + self._tail
        self._tool_closing = b'"}}]},"finish_reason":null}' + self._tail
        self._openings: dict[TextTrack, bytes] = {}

    def text(self, event_id: int, track: TextTrack, text: bytes) -> bytes:
        """See app.stream.token_stream.Wire. The token path: one dictionary look-up and one join."""
        opening = self._openings.get(track)
        if opening is None:
            lead = _lead(reasoning=track.channel == "reasoning")
            opening = self._head + b'{"index":%d,"delta":{%b%b' % (track.choice, lead, _field(track))
            self._openings[track] = opening
        closing = self._tool_closing if track.channel == "tool" else self._closing
        return b"id: %d\ndata: %b%b%b" % (event_id, opening, text, closing)

    def delta(self, last_id: int, parts: Sequence[TextRun]) -> bytes:
        """See app.stream.token_stream.Wire."""
        if len(parts) == 1 and parts[0].logprobs is None and parts[0].counts is None:
            return self.text(last_id, parts[0].track, parts[0].text)
        return self._several(last_id, parts)

    def _several(self, last_id: int, parts: Sequence[TextRun]) -> bytes:
        by_choice: dict[int, list[TextRun]] = {}
        for run in parts:
            by_choice.setdefault(run.track.choice, []).append(run)
        choices = b",".join(self._choice(choice, tracks) for choice, tracks in by_choice.items())
        tail = self._tail
        counts = parts[-1].counts  # of all choices, at the frame's last event
        if counts is not None:
            tail = b'],"usage":%b}\n\n' % orjson.dumps(usage_of({0: counts}))
        return b"id: %d\ndata: %b%b%b" % (last_id, self._head, choices, tail)

    def _choice(self, choice: int, parts: Sequence[TextRun]) -> bytes:
        fields = [_field(p.track) + p.text + b'"' for p in parts if p.track.channel != "tool"]
        calls = [
            b'{"index":%d,"function":{"arguments":"%b"}}' % (p.track.tool_index, p.text)
            for p in parts
            if p.track.channel == "tool"
        ]
        if calls:
            fields.append(b'"tool_calls":[' + b",".join(calls) + b"]")
        lead = _lead(reasoning=any(p.track.channel == "reasoning" for p in parts))
        delta = lead + b",".join(fields)
        entries = b",".join(p.logprobs for p in parts if p.logprobs)
        logprobs = b',"logprobs":{"content":[' + entries + b"]}" if entries else b""
        return b'{"index":%d,"delta":{%b}%b,"finish_reason":null}' % (choice, delta, logprobs)

    def special(self, event_id: int, event: ControlEvent) -> bytes:
        """See app.stream.token_stream.Wire."""
        match event:
            case Opened(n):
                return self._opened(event_id, n)
            case ToolStarted(choice, tool):
                call = {
                    "index": tool.index,
                    "id": tool.id,
                    "type": "function",
                    "function": {"name": tool.name, "arguments": ""},
                }
                return self._chunk(event_id, choice, {"tool_calls": [call]}, None)
            case Finished(choice, finish_reason, matched_stop):
                return self._chunk(event_id, choice, {}, finish_reason, matched_stop=matched_stop)
            case Notice(field, value):
                body = self._head + b'],"%b":%b}\n\n' % (field.encode(), orjson.dumps(value))
                return b"id: %d\ndata: %b" % (event_id, body)
            case Failed(body):
                return b"id: %d\ndata: %b\n\n" % (event_id, orjson.dumps(body))
            case Done():
                return b"id: %d\ndata: [DONE]\n\n" % event_id

    def _opened(self, event_id: int, n: int) -> bytes:
        delta = {"role": "assistant", "content": "", "reasoning_content": None}
        choices = [{"index": i, "delta": delta, "finish_reason": None} for i in range(n)]
        body = self._head + orjson.dumps(choices)[1:-1] + self._opening_tail
        return b"id: %d\nretry: %d\ndata: %b" % (event_id, RETRY_MS, body)

    def _chunk(
        self,
        event_id: int,
        choice: int,
        delta: Mapping[str, Any],
        finish_reason: str | None,
        *,
        matched_stop: str | int | None = None,
    ) -> bytes:
        entry: dict[str, Any] = {
            "index": choice,
            "delta": {"reasoning_content": None, **delta},
            "finish_reason": known_finish(finish_reason),
        }
        if finish_reason is not None:
            entry["matched_stop"] = matched_stop
        return b"id: %d\ndata: %b%b%b" % (event_id, self._head, orjson.dumps(entry), self._tail)


def _field(track: TextTrack) -> bytes:
    """The delta's field up to and with the quote that opens the track's text."""
    if track.channel == "tool":
        return b'"tool_calls":[{"index":%d,"function":{"arguments":"' % track.tool_index
    return _FIELD[track.channel] + b':"'


def _lead(*, reasoning: bool) -> bytes:
    """What a delta without reasoning begins with: clients of SGLang read the field in every chunk."""
    return b"" if reasoning else b'"reasoning_content":null,'


class EventStream:
    """An ASGI response that follows a reader to the end of its stream."""

    def __init__(
        self,
        reader: Reader,
        client: Client,
        headers: Mapping[str, str],
        *,
        on_end: Callable[[], None],
        plain: bool = False,
    ) -> None:
        """`on_end` is called once, when the response is over. A `plain` response has no event ids."""
        self._reader = reader
        self._plain = plain
        self._on_end = on_end
        self._client = client
        self._headers = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-store",
            # Buffering proxies (nginx) would hold tokens back.
            "x-accel-buffering": "no",
            **headers,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream; returns when it ends or the client leaves."""
        reader = self._reader
        sink: FrameSink = scope["extensions"][CONNECTION]
        if self._plain:
            sink = PlainSink(sink)
        self._client.on_gone(reader.close)
        headers = [(k.encode("latin-1"), v.encode("latin-1")) for k, v in self._headers.items()]
        try:
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            if scope["method"] != "HEAD":
                await self._follow(sink)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._client.stop()
            self._on_end()

    async def _follow(self, sink: FrameSink) -> None:
        try:
            await self._reader.follow(sink, PING)
        except ReplayExpired as error:
            sink.write(b"data: %b\n\ndata: [DONE]\n\n" % orjson.dumps(error.as_body()))
        await self._reader.caught_up(sink)
