"""Answers of chat requests: `chat.completion.chunk` frames of a stream, and a whole `chat.completion`.

    id: 7
    data: {"id":"chatcmpl-…","object":"chat.completion.chunk",…}

What clients' parsers decide (checked against OpenAI's SDKs, tests/e2e): ids on data events only; `retry:`
stands inside the first data event. HTML living standard, section 9.2, "Server-sent events".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from app.core import ChatRequest, known_finish
from app.stream.ring import (
    ControlEvent,
    Done,
    ExtraChunk,
    Failed,
    Finished,
    Opened,
    TextRun,
    TextTrack,
    ToolStarted,
)
from app.stream.token_stream import TokenStream, usage_of
from app.stream.transcript import ChoiceMessage, build_messages

RETRY_MS = 1000
_FIELD = {"text": b'"content"', "reasoning": b'"reasoning_content"'}


class ChunkWire:
    """Writes the events of one stream as `chat.completion.chunk` frames.

    `TokenStream.conclude` decides whether there is a last one with the usage.
    """

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
        """The frame of a text event. The token path: one dictionary look-up and one join."""
        opening = self._openings.get(track)
        if opening is None:
            lead = _lead(reasoning=track.channel == "reasoning")
            opening = self._head + b'{"index":%d,"delta":{%b%b' % (track.choice, lead, _field(track))
            self._openings[track] = opening
        closing = self._tool_closing if track.channel == "tool" else self._closing
        return b"id: %d\ndata: %b%b%b" % (event_id, opening, text, closing)

    def delta(self, last_id: int, parts: Sequence[TextRun]) -> bytes:
        """The frames of one delta's text events."""
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

    def control(self, event_id: int, event: ControlEvent) -> bytes:
        """The frame of a control event."""
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
            case ExtraChunk(field, value):
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
    """The beginning of a delta: without reasoning a null, as clients of SGLang read it in every chunk."""
    return b"" if reasoning else b'"reasoning_content":null,'


def completion(stream: TokenStream) -> dict[str, Any]:
    """OpenAI's chat.completion object. Raises ServingError when the stream ended in one."""
    if stream.error is not None:
        raise stream.error
    parts, control_events = stream.whole()
    request = stream.request
    answer: dict[str, Any] = {
        "id": request.request_id,
        "object": "chat.completion",
        "created": request.created_at_unix_s,
        "model": request.model,
    }
    if request.conversation_id is not None:
        answer |= {"conversation_id": request.conversation_id, "message_id": request.message_id}
    answer |= {event.field: event.value for event in control_events if isinstance(event, ExtraChunk)}
    choices = build_messages(parts, control_events)
    answer["choices"] = [_choice(i, choices[i], parts) for i in sorted(choices)]
    answer["usage"] = stream.usage
    return answer


def _choice(index: int, answer: ChoiceMessage, parts: Mapping[TextTrack, TextRun]) -> dict[str, Any]:
    entries = logprob_entries(index, parts)
    return {
        "index": index,
        "message": {"reasoning_content": None, **answer.message},
        "logprobs": {"content": entries} if entries else None,
        "finish_reason": known_finish(answer.finish_reason),
        "matched_stop": answer.matched_stop,
    }


def logprob_entries(index: int, parts: Mapping[TextTrack, TextRun]) -> list[dict[str, Any]]:
    """The entries of OpenAI's `logprobs.content` of a choice; none where they were not asked for."""
    entries = b",".join(p.logprobs for track, p in parts.items() if track.choice == index and p.logprobs)
    content: list[dict[str, Any]] = orjson.loads(b"[" + entries + b"]")
    return content
