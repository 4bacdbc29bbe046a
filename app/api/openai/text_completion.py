"""Answers of `/v1/completions`: `text_completion` objects, as frames of a stream and whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from app.api.openai.chat_completion import RETRY_MS, ChunkWire, logprob_entries
from app.core import ChatRequest, known_finish
from app.stream.ring import ExtraChunk, TextRun, TextTrack
from app.stream.token_stream import TokenStream
from app.stream.transcript import ChoiceMessage, build_messages


class CompletionWire(ChunkWire):
    """Writes one stream's events as `text_completion` frames: all text of a choice is its `text`."""

    OBJECT = "text_completion"

    def __init__(self, request: ChatRequest) -> None:
        super().__init__(request)
        self._closing = b'","logprobs":null,"finish_reason":null}' + self._tail

    def text(self, event_id: int, track: TextTrack, text: bytes) -> bytes:
        """The frame of a text event."""
        opening = self._openings.get(track)
        if opening is None:
            opening = self._openings[track] = self._head + b'{"index":%d,"text":"' % track.choice
        return b"id: %d\ndata: %b%b%b" % (event_id, opening, text, self._closing)

    def _choice(self, choice: int, parts: Sequence[TextRun]) -> bytes:
        text = b"".join(run.text for run in parts)
        entries = b",".join(run.logprobs for run in parts if run.logprobs)
        logprobs = orjson.dumps(_logprobs(orjson.loads(b"[" + entries + b"]"))) if entries else b"null"
        return b'{"index":%d,"text":"%b","logprobs":%b,"finish_reason":null}' % (choice, text, logprobs)

    def _opened(self, event_id: int, n: int) -> bytes:
        choices = orjson.dumps([_empty_choice(index) for index in range(n)])[1:-1]
        return b"id: %d\nretry: %d\ndata: %b%b%b" % (event_id, RETRY_MS, self._head, choices, self._tail)

    def _chunk(
        self,
        event_id: int,
        choice: int,
        delta: Mapping[str, Any],
        finish_reason: str | None,
        *,
        matched_stop: str | int | None = None,
    ) -> bytes:
        del delta  # of a tool call, which no prompt without a template has
        entry = _empty_choice(choice)
        entry |= {"finish_reason": known_finish(finish_reason), "matched_stop": matched_stop}
        return b"id: %d\ndata: %b%b%b" % (event_id, self._head, orjson.dumps(entry), self._tail)


def text_completion(streams: Sequence[TokenStream]) -> dict[str, Any]:
    """OpenAI's text_completion object over the finished streams of all prompts, in their order.

    What an extra chunk says of one of several prompts stands in the choices of that prompt. Raises
    ServingError when a stream ended in one.
    """
    request = streams[0].request
    answer: dict[str, Any] = {
        "id": request.request_id,
        "object": CompletionWire.OBJECT,
        "created": request.created_at_unix_s,
        "model": request.model,
        "choices": [],
    }
    for number, stream in enumerate(streams):
        if stream.error is not None:
            raise stream.error
        parts, control_events = stream.whole()
        extra = {event.field: event.value for event in control_events if isinstance(event, ExtraChunk)}
        if len(streams) == 1:
            answer |= extra
            extra = {}
        for index, choice in sorted(build_messages(parts, control_events).items()):
            place = number * stream.request.n + index
            answer["choices"].append(_whole_choice(place, choice, logprob_entries(index, parts)) | extra)
    answer["usage"] = _total([stream.usage or {} for stream in streams])
    return answer


def _whole_choice(index: int, answer: ChoiceMessage, entries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    return _empty_choice(index) | {
        "text": answer.message["content"] or "",
        "logprobs": _logprobs(entries, with_offsets=True) if entries else None,
        "finish_reason": known_finish(answer.finish_reason),
        "matched_stop": answer.matched_stop,
    }


def _empty_choice(index: int) -> dict[str, Any]:
    return {"index": index, "text": "", "logprobs": None, "finish_reason": None}


def _logprobs(entries: Sequence[Mapping[str, Any]], *, with_offsets: bool = False) -> dict[str, Any]:
    """OpenAI's older logprobs object. A frame has no offsets: it does not know the text before it."""
    tokens = [entry["token"] for entry in entries]
    tops = [{top["token"]: top["logprob"] for top in entry["top_logprobs"]} or None for entry in entries]
    body = {
        "tokens": tokens,
        "token_logprobs": [entry["logprob"] for entry in entries],
        "top_logprobs": tops if any(tops) else None,
    }
    if with_offsets:
        ends = [0]
        for token in tokens:
            ends.append(ends[-1] + len(token))
        body["text_offset"] = ends[:-1]
    return body


def _total(usages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The usage of several prompts together, field by field."""
    total: dict[str, Any] = dict(usages[0])
    for usage in usages[1:]:
        for name, value in usage.items():
            subtotal = total.get(name)
            if isinstance(value, Mapping):
                total[name] = _total([subtotal or {}, value])
            elif value is not None:
                total[name] = value + (subtotal or 0)
    return total
