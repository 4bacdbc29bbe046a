"""A finished stream as one `chat.completion` object."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from app.ring import Finished, Lane, Notice, Part, ToolStarted
from app.stream import TokenStream


def completion(stream: TokenStream) -> dict[str, Any]:
    """OpenAI's chat.completion object. Raises ServingError when the stream ended in one."""
    if stream.error is not None:
        raise stream.error
    parts, specials = stream.whole()
    request = stream.request
    choices: dict[int, dict[str, Any]] = {}
    answer: dict[str, Any] = {
        "id": request.request_id,
        "object": "chat.completion",
        "created": request.created_at_unix_s,
        "model": request.model,
    }
    for event in specials:
        match event:
            case ToolStarted(choice, tool):
                call = {
                    "id": tool.id,
                    "type": "function",
                    "function": {
                        "name": tool.name,
                        "arguments": _text(parts, Lane(choice, "tool", tool.index)) or "",
                    },
                }
                choices.setdefault(choice, {}).setdefault("tool_calls", []).append(call)
            case Finished(choice, finish_reason, matched_stop):
                entry = choices.setdefault(choice, {})
                entry |= {"finish_reason": finish_reason, "matched_stop": matched_stop}
            case Notice(field, value):
                answer[field] = value
    answer["choices"] = [_choice(i, choices[i], parts) for i in sorted(choices)]
    answer["usage"] = stream.usage
    return answer


def _choice(index: int, entry: Mapping[str, Any], parts: Mapping[Lane, Part]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": _text(parts, Lane(index, "text"))}
    if (reasoning := _text(parts, Lane(index, "reasoning"))) is not None:
        message["reasoning_content"] = reasoning
    if "tool_calls" in entry:
        message["tool_calls"] = entry["tool_calls"]
    elif message["content"] is None:
        message["content"] = ""
    choice = {
        "index": index,
        "message": message,
        "logprobs": _logprobs(index, parts),
        "finish_reason": entry.get("finish_reason"),
    }
    if entry.get("matched_stop") is not None:
        choice["matched_stop"] = entry["matched_stop"]
    return choice


def _text(parts: Mapping[Lane, Part], lane: Lane) -> str | None:
    part = parts.get(lane)
    return None if part is None else orjson.loads(b'"' + part.text + b'"')


def _logprobs(index: int, parts: Mapping[Lane, Part]) -> dict[str, Any] | None:
    entries = b",".join(p.logprobs for lane, p in parts.items() if lane.choice == index and p.logprobs)
    return {"content": orjson.loads(b"[" + entries + b"]")} if entries else None
