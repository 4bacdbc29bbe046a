"""The messages of a request: checked key by key, and brought to the form that all stages read.

Store, screens, estimates and templates read the same normalised messages: known keys only, no nulls.
An answer may be sent back as any SDK dumps it, and so may a message of `GET /api/conversations/{id}`:
what is in them that no model reads (ACCEPTED) is taken and dropped. Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.schema.fields import bounded_text, fields_of, shown
from app.api.schema.parameters import MAX_MESSAGES, MAX_REQUEST_CALLS, check_kind
from app.errors import BadRequest
from app.messages import (
    DETAILS,
    MAX_ID_CHARS,
    MAX_NAME_CHARS,
    MAX_PARTS,
    MAX_TOOL_CALLS,
    arguments_text,
)

ROLES = ("system", "developer", "user", "assistant", "tool")

SERVERS_OWN = frozenset(
    {
        "id",
        "parent_id",
        "created_at",
        "status",
        "finish_reason",
        "usage",
        "request_id",
        "choice",
        "matched_stop",
    }
)
"""Keys that this server's own messages have, in a conversation or an answer."""
ACCEPTED = SERVERS_OWN | {
    "cache_control",  # Anthropic's, set by LangChain, LiteLLM and others whatever the server
    "provider_specific_fields",  # LiteLLM
}
"""Keys of any message that are taken and dropped."""
ACCEPTED_OF_ASSISTANT = frozenset(
    {
        "refusal",  # OpenAI, as are the next three
        "annotations",
        "audio",
        "function_call",
        "parsed",  # OpenAI's SDK, of an answer that it has parsed
        "reasoning_details",  # OpenRouter
        "thinking_blocks",  # LiteLLM, as are the next two
        "images",
        "logprobs",
    }
)
ACCEPTED_OF_PART = frozenset({"cache_control", "annotations", "citations", "id", "index", "logprobs"})
ACCEPTED_OF_CALL = frozenset({"index", "cache_control", "provider_specific_fields", "extra_content"})
ACCEPTED_OF_FUNCTION = frozenset({"parsed_arguments", "provider_specific_fields"})
ACCEPTED_OF_IMAGE = frozenset({"format"})
"""LiteLLM's media type of the image, which its data URL has too."""

_KEYS: Mapping[str, frozenset[str]] = {
    role: frozenset({"role", "content", "name"}) | ACCEPTED for role in ROLES
} | {
    "assistant": frozenset({"role", "content", "name", "tool_calls", "reasoning_content", "reasoning"})
    | ACCEPTED
    | ACCEPTED_OF_ASSISTANT,
    "tool": frozenset({"role", "content", "name", "tool_call_id"}) | ACCEPTED,
}
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "audio", "reasoning_content", "reasoning")
"""The fields that an assistant's message may have where its content is null."""


def normalized(messages: Sequence[Any], *, may_be_empty: bool = False) -> list[dict[str, Any]]:
    """The messages as the stages read them. Raises BadRequest and UnsupportedParameter naming the place."""
    if not messages and not may_be_empty:
        raise BadRequest("messages must hold at least one message.", param="messages")
    _check_length("messages", messages, MAX_MESSAGES, "messages")
    _check_calls(messages)
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _check_calls(messages: Sequence[Any]) -> None:
    """Raise BadRequest for too many tool calls, before any of them is checked."""
    sent = (message.get("tool_calls") for message in messages if isinstance(message, dict))
    calls = sum(len(of_message) for of_message in sent if isinstance(of_message, list))
    if calls > MAX_REQUEST_CALLS:
        raise BadRequest(
            f"messages take at most {MAX_REQUEST_CALLS:,} tool calls together, got {calls:,}.",
            param="messages",
        )


def _message(message: Any, where: str) -> dict[str, Any]:
    check_kind(where, message, dict)
    role = message.get("role")
    if role not in ROLES:
        raise BadRequest(
            f"{where}.role must be one of {', '.join(ROLES)}, got {shown(role)}.",
            code="invalid_role",
            param=f"{where}.role",
        )
    sent = fields_of(message, where, _KEYS[role])
    result = {"role": role}
    if (content := _content(sent, where)) is not None:
        result["content"] = content
    if "name" in sent:
        result["name"] = bounded_text(sent["name"], f"{where}.name", MAX_NAME_CHARS)
    if "tool_call_id" in sent:
        result["tool_call_id"] = bounded_text(sent["tool_call_id"], f"{where}.tool_call_id", MAX_ID_CHARS)
    for name in ("reasoning_content", "reasoning"):
        if name in sent:
            check_kind(f"{where}.{name}", sent[name], str)
            result.setdefault("reasoning_content", sent[name])
    if "tool_calls" in sent and (calls := _calls(sent["tool_calls"], f"{where}.tool_calls")):
        result["tool_calls"] = calls
    return result


def _content(sent: Mapping[str, Any], where: str) -> str | list[dict[str, Any]] | None:
    """A string, parts, or None where an assistant only called tools.

    Null is an empty text of a tool: agents send back what returned nothing.
    """
    content = sent.get("content")
    if content is None:
        may_be_null = sent["role"] == "assistant" and any(sent.get(name) for name in _INSTEAD_OF_CONTENT)
        if sent["role"] != "tool" and not may_be_null:
            place = f"{where}.content"
            raise BadRequest(f"{place} is required.", code="missing_parameter", param=place)
        return None if sent.get("tool_calls") else ""
    check_kind(f"{where}.content", content, str, list)
    if isinstance(content, str):
        return content
    _check_length(f"{where}.content", content, MAX_PARTS, "parts")
    role = sent["role"]
    return [
        _content_part(content_part, f"{where}.content[{j}]", role) for j, content_part in enumerate(content)
    ]


def _content_part(content_part: Any, where: str, role: str) -> dict[str, Any]:
    check_kind(where, content_part, dict)
    kind = content_part.get("type")
    check_kind(f"{where}.type", kind, str)
    if kind == "text" or (kind == "refusal" and role == "assistant"):
        sent = fields_of(content_part, where, {"type", kind} | ACCEPTED_OF_PART)
        check_kind(f"{where}.{kind}", sent.get(kind), str)
        return {"type": "text", "text": sent[kind]}
    if kind == "image_url":
        sent = fields_of(content_part, where, {"type", "image_url"} | ACCEPTED_OF_PART)
        return {"type": "image_url", "image_url": _image(sent.get("image_url"), f"{where}.image_url")}
    raise BadRequest(
        f"{where} is a part of type {shown(kind)}; text and image_url parts are served. Remove it.",
        code="unsupported_content",
        param=where,
    )


def _image(image: Any, where: str) -> dict[str, str]:
    check_kind(where, image, dict)
    sent = fields_of(image, where, {"url", "detail"} | ACCEPTED_OF_IMAGE)
    check_kind(f"{where}.url", sent.get("url"), str)
    result = {"url": sent["url"]}
    if "detail" in sent:
        if sent["detail"] not in DETAILS:
            raise BadRequest(
                f"{where}.detail must be one of {', '.join(DETAILS)}, got {shown(sent['detail'])}.",
                param=f"{where}.detail",
            )
        result["detail"] = sent["detail"]
    return result


def _calls(calls: Any, where: str) -> list[dict[str, Any]]:
    check_kind(where, calls, list)
    _check_length(where, calls, MAX_TOOL_CALLS, "tool calls")
    return [_call(call, f"{where}[{k}]") for k, call in enumerate(calls)]


def _call(call: Any, where: str) -> dict[str, Any]:
    check_kind(where, call, dict)
    kind = call.get("type", "function")
    if kind not in ("function", None):
        raise BadRequest(
            f"{where} is a call of type {shown(kind)}; calls of functions are served.",
            code="unsupported_content",
            param=where,
        )
    sent = fields_of(call, where, {"id", "type", "function"} | ACCEPTED_OF_CALL)
    result: dict[str, Any] = {}
    if "id" in sent:
        result["id"] = bounded_text(sent["id"], f"{where}.id", MAX_ID_CHARS)
    return result | {"type": "function", "function": _function(sent.get("function"), f"{where}.function")}


def _function(function: Any, where: str) -> dict[str, str]:
    check_kind(where, function, dict)
    sent = fields_of(function, where, {"name", "arguments"} | ACCEPTED_OF_FUNCTION)
    if "arguments" in sent:
        check_kind(f"{where}.arguments", sent["arguments"], str, dict)
    name = bounded_text(sent.get("name"), f"{where}.name", MAX_NAME_CHARS)
    return {"name": name, "arguments": arguments_text(sent.get("arguments"))}


def _check_length(where: str, items: Sequence[Any], limit: int, noun: str) -> None:
    if len(items) > limit:
        raise BadRequest(f"{where} takes at most {limit} {noun}, got {len(items)}.", param=where)
