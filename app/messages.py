"""The stored form of a message: known keys, of the types and lengths that they may have.

`kept` never raises, whatever it is handed: rows of older versions hold what their callers sent.
What a caller may send is `app.api.schema.messages`' affair, which refuses by name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson

MAX_PARTS = 2048
"""Content parts of a message; retrieval sends one a passage, a video's frames one each."""
MAX_TOOL_CALLS = 128
"""Tool calls of a message; OpenAI takes as many tools."""
MAX_NAME_CHARS = 256
"""Of a speaker or a function; OpenAI takes 64."""
MAX_ID_CHARS = 4096
"""Of a tool call; LiteLLM packs signatures of Gemini's reasoning into it, which are kilobytes."""
DETAILS = ("auto", "low", "high")
"""Values of `image_url.detail`."""
NO_ARGUMENTS = "{}"
"""Arguments as JSON where there are none: models and SDKs also say so with an empty string."""


def content_texts(content: object) -> list[str]:
    """The texts of a message's content, in order: the string itself, or each part's. Never raises."""
    if isinstance(content, str):
        return [content]
    items = content if isinstance(content, Sequence) else ()
    texts = (item.get("text") for item in items if isinstance(item, Mapping))
    return [text for text in texts if isinstance(text, str)]


def content_text(content: object) -> str:
    """The texts of a message's content, a line each. Never raises."""
    return content if isinstance(content, str) else "\n".join(content_texts(content))


def count_media(content: object) -> int:
    """The number of a content's parts that are no text: images, audio, video, files. Never raises."""
    items = content if isinstance(content, Sequence) and not isinstance(content, str) else ()
    return sum(isinstance(item, Mapping) and item.get("type") not in (None, "text") for item in items)


def as_kept(role: str, text: str, body: bytes | None) -> dict[str, Any]:
    """The message of a stored row, whose `body` is its JSON where it is more than a role and a text."""
    if body is None:
        return {"role": role, "content": text}
    try:
        message = orjson.loads(body)
    except orjson.JSONDecodeError:  # none of ours
        message = None
    return kept(message, role, text)


def kept(message: Any, role: str, text: str) -> dict[str, Any]:
    """The message as it is stored and shown: its role, its content, and what else it may have.

    `role` and `text` are the row's; the text stands in for a content that cannot be read.
    """
    source: Mapping[str, Any] = message if isinstance(message, dict) else {}
    result: dict[str, Any] = {"role": role, "content": text}
    content = source.get("content")
    if isinstance(content, str):
        result["content"] = content
    elif isinstance(content, list):
        result["content"] = list(_parts(content))
    if _is_text(source.get("name"), MAX_NAME_CHARS):
        result["name"] = source["name"]
    if role == "tool" and _is_text(source.get("tool_call_id"), MAX_ID_CHARS):
        result["tool_call_id"] = source["tool_call_id"]
    if role == "assistant":
        result |= _of_assistant(source)
        if content is None and result.get("tool_calls"):
            result["content"] = None
    return result


def _of_assistant(source: Mapping[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    if isinstance(source.get("reasoning_content"), str):
        result["reasoning_content"] = source["reasoning_content"]
    calls = source.get("tool_calls")
    if isinstance(calls, list) and (readable := list(_calls(calls))):
        result["tool_calls"] = readable
    return result


def _parts(content: list[Any]) -> Iterator[dict[str, Any]]:
    for item in content[:MAX_PARTS]:
        if not isinstance(item, dict):
            continue
        if item.get("type") == "text" and isinstance(item.get("text"), str):
            yield {"type": "text", "text": item["text"]}
        elif item.get("type") == "image_url" and (image := _image(item.get("image_url"))):
            yield {"type": "image_url", "image_url": image}


def _image(image: Any) -> dict[str, str]:
    if not isinstance(image, dict) or not isinstance(image.get("url"), str):
        return {}
    detail = {"detail": image["detail"]} if image.get("detail") in DETAILS else {}
    return {"url": image["url"]} | detail


def _calls(calls: list[Any]) -> Iterator[dict[str, Any]]:
    for call in calls[:MAX_TOOL_CALLS]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not _is_text(function.get("name"), MAX_NAME_CHARS):
            continue
        shown: dict[str, Any] = {}
        if _is_text(call.get("id"), MAX_ID_CHARS):
            shown["id"] = call["id"]
        arguments = arguments_text(function.get("arguments"))
        yield shown | {"type": "function", "function": {"name": function["name"], "arguments": arguments}}


def arguments_text(arguments: Any) -> str:
    """A call's arguments as the JSON text that OpenAI's API has; an object is written as such."""
    if isinstance(arguments, str):
        return (arguments.strip() and arguments) or NO_ARGUMENTS
    return orjson.dumps(arguments).decode() if isinstance(arguments, dict) else NO_ARGUMENTS


def _is_text(value: Any, max_chars: int) -> bool:
    return isinstance(value, str) and len(value) <= max_chars


def without_surrogates(text: str) -> str:
    """The text with a question mark for each lone surrogate, which UTF-8 cannot carry."""
    return text.encode("utf-8", "replace").decode("utf-8")


def json_escaped(text: str) -> bytes:
    """The text as it stands in JSON, without its quotes."""
    try:
        return orjson.dumps(text)[1:-1]
    except orjson.JSONEncodeError:
        return orjson.dumps(without_surrogates(text))[1:-1]
