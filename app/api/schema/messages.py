"""The messages of a request: checked key by key, and brought to the form that all stages read.

Store, screens, estimates and templates read the same normalised messages: known keys only, no nulls.
An answer may be sent back as any SDK dumps it, and so may a message of `GET /api/conversations/{id}`:
what is in them that no model reads (ACCEPTED) is taken and dropped. Anything else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.schema.fields import (
    TEXT,
    Field,
    check_kind,
    check_size,
    dropped,
    missing,
    not_among,
    read,
    shown,
)
from app.api.schema.parameters import MAX_MESSAGES, MAX_REQUEST_CALLS
from app.errors import BadRequest
from app.messages import DETAILS, MAX_ID_CHARS, MAX_NAME_CHARS, MAX_PARTS, MAX_TOOL_CALLS, arguments_text

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
        "model",
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

_NAME = Field((str,), max_chars=MAX_NAME_CHARS)
_ID = Field((str,), max_chars=MAX_ID_CHARS)
_IMAGE = Field(
    (dict,),
    fields={"url": TEXT, "detail": Field((str,), choices=DETAILS), **dropped(ACCEPTED_OF_IMAGE)},
    required=("url",),
)
PARTS: Mapping[str, Field] = {
    kind: Field(
        (dict,),
        fields={"type": Field((str,), choices=(kind,)), kind: content, **dropped(ACCEPTED_OF_PART)},
        required=(kind,),
    )
    for kind, content in {"text": TEXT, "image_url": _IMAGE, "refusal": TEXT}.items()
}
"""The content parts that are read, by their type; a refusal is an assistant's text."""
_FUNCTION = Field(
    (dict,),
    fields={"name": _NAME, "arguments": Field((str, dict)), **dropped(ACCEPTED_OF_FUNCTION)},
    required=("name",),
)
_CALL = Field(
    (dict,),
    fields={"id": _ID, "type": TEXT, "function": _FUNCTION, **dropped(ACCEPTED_OF_CALL)},
    required=("function",),
)
_OF_ANY: Mapping[str, Field] = {
    "role": TEXT,
    "content": Field((str, list), max_entries=MAX_PARTS),
    "name": _NAME,
    **dropped(ACCEPTED),
}
_OF_ASSISTANT: Mapping[str, Field] = {
    "tool_calls": Field((list,), max_entries=MAX_TOOL_CALLS),
    "reasoning_content": TEXT,
    "reasoning": TEXT,
    **dropped(ACCEPTED_OF_ASSISTANT),
}
MESSAGES: Mapping[str, Field] = {
    **dict.fromkeys(ROLES, Field((dict,), fields=_OF_ANY)),
    "assistant": Field((dict,), fields={**_OF_ANY, **_OF_ASSISTANT}),
    "tool": Field((dict,), fields={**_OF_ANY, "tool_call_id": _ID}),
}
"""The message of each role."""
_INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "refusal", "audio", "reasoning_content", "reasoning")
"""The fields that an assistant's message may have where its content is null."""


def normalized(
    messages: Sequence[Any], *, may_be_empty: bool = False, max_messages: int = MAX_MESSAGES
) -> list[dict[str, Any]]:
    """The messages as the stages read them. Raises BadRequest and UnsupportedParameter naming the place."""
    if not messages and not may_be_empty:
        raise BadRequest("messages must hold at least one message.", param="messages")
    check_size("messages", len(messages), 0, max_messages, "messages")
    # Before any of them is checked.
    sent = (message.get("tool_calls") for message in messages if isinstance(message, dict))
    calls = sum(len(of_message) for of_message in sent if isinstance(of_message, list))
    check_size("messages", calls, 0, MAX_REQUEST_CALLS, "tool calls together")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    check_kind(where, message, dict)
    role = message.get("role")
    if role not in ROLES:
        raise not_among(f"{where}.role", role, ROLES, code="invalid_role")
    sent = read(message, where, MESSAGES[role])
    result = {"role": role}
    if (content := _content(sent.get("content"), message, where)) is not None:
        result["content"] = content
    for name in ("name", "tool_call_id"):
        if name in sent:
            result[name] = sent[name]
    reasoning = sent.get("reasoning_content", sent.get("reasoning"))
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if calls := sent.get("tool_calls"):
        result["tool_calls"] = [_call(call, f"{where}.tool_calls[{k}]") for k, call in enumerate(calls)]
    return result


def _content(content: Any, message: Mapping[str, Any], where: str) -> str | list[dict[str, Any]] | None:
    """A string, parts, or None where an assistant only called tools.

    Null is an empty text of a tool: agents send back what returned nothing.
    """
    role = message["role"]
    if content is None:
        may_be_null = role == "assistant" and any(message.get(name) for name in _INSTEAD_OF_CONTENT)
        if role != "tool" and not may_be_null:
            raise missing(f"{where}.content")
        return None if message.get("tool_calls") else ""
    if isinstance(content, str):
        return content
    return [_content_part(entry, f"{where}.content[{j}]", role) for j, entry in enumerate(content)]


def _content_part(sent: Any, where: str, role: str) -> dict[str, Any]:
    check_kind(where, sent, dict)
    kind = sent.get("type")
    check_kind(f"{where}.type", kind, str)
    if kind not in PARTS or (kind == "refusal" and role != "assistant"):
        raise BadRequest(
            f"{where} is a part of type {shown(kind)}; text and image_url parts are served. Remove it.",
            code="unsupported_content",
            param=where,
        )
    content = read(sent, where, PARTS[kind])[kind]
    return {"type": kind, kind: content} if kind == "image_url" else {"type": "text", "text": content}


def _call(call: Any, where: str) -> dict[str, Any]:
    check_kind(where, call, dict)
    kind = call.get("type", "function")
    if kind not in ("function", None):
        raise BadRequest(
            f"{where} is a call of type {shown(kind)}; calls of functions are served.",
            code="unsupported_content",
            param=where,
        )
    sent = read(call, where, _CALL)
    function = sent["function"]
    own_id = {"id": sent["id"]} if "id" in sent else {}
    arguments = arguments_text(function.get("arguments"))
    return own_id | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}
