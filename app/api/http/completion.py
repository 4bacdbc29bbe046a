"""A finished stream as one `chat.completion` object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from app.core import known_finish
from app.stream.ring import Notice, TextRun, TextTrack
from app.stream.token_stream import TokenStream
from app.stream.transcript import ChoiceMessage, answers


def completion(stream: TokenStream) -> dict[str, Any]:
    """OpenAI's chat.completion object. Raises ServingError when the stream ended in one."""
    if stream.error is not None:
        raise stream.error
    parts, specials = stream.whole()
    request = stream.request
    answer: dict[str, Any] = {
        "id": request.request_id,
        "object": "chat.completion",
        "created": request.created_at_unix_s,
        "model": request.model,
    }
    if request.conversation_id is not None:
        answer |= {"conversation_id": request.conversation_id, "message_id": request.message_id}
    answer |= {event.field: event.value for event in specials if isinstance(event, Notice)}
    choices = answers(parts, specials)
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
