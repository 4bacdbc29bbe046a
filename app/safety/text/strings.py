"""Every string of a request that a chat template can write: keys and values, wherever they stand.

What no template writes is left out by name, and so is what the protocol itself says, as "type" and "object":
it is in every schema and no sign of harm. Bounded by the size of the request; knows no roles and no weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import orjson

from app.messages import content_texts
from app.safety.text.escapes import unescape

UNRENDERED = frozenset({"model", "messages", "stop", "stop_token_ids", "logit_bias", "regex", "ebnf"})
"""Parameters whose strings reach no prompt, and the messages, which are read separately."""
_PROTOCOL_WORDS = """
    type function name description parameters properties required items enum const default title examples
    strict additionalProperties anyOf allOf oneOf $ref $defs $schema definitions format pattern minimum
    maximum
    minItems maxItems minLength maxLength object string number integer boolean array null
    date date-time uri email uuid json_schema json_object schema text image_url url detail low medium high
    auto none tool_calls tool_call_id function_call arguments id index content reasoning_content refusal
    annotations audio role system developer user assistant tool thinking enable_thinking reasoning_effort
"""
_PROTOCOL = frozenset(_PROTOCOL_WORDS.split())
"""Words of OpenAI's protocol and of JSON Schema, each of which is harmless as a string of its own."""
_DATA_URL = re.compile(r"data:[\w.+-]{0,40}/?[\w.+-]{0,80}(;[\w.+-]{1,40}=[\w.+-]{1,40}){0,4};base64,")


def request_text(body: Mapping[str, Any]) -> str:
    """The strings of a request beside its messages: tools, formats, variables of the template; one a line."""
    beside = {
        name: value
        for name, value in body.items()
        if isinstance(value, (str, list, dict)) and name not in UNRENDERED
    }
    return "\n".join(strings_in(list(beside.values()))) if beside else ""


def message_text(message: Mapping[str, Any]) -> str:
    """All that a message says: its content, and then its other fields."""
    return "\n".join(fields_of(message))


def fields_of(message: Mapping[str, Any]) -> list[str]:
    """The text of a message by field: the content first, each tool call for itself, no field's own name."""
    content = message.get("content")
    texts = [text_of(content)]
    if not isinstance(content, str):
        texts.append("\n".join(strings_in(_without_text(content))))
    for name, value in message.items():
        if name in ("role", "content"):
            continue
        texts += ("\n".join(strings_in(each)) for each in (value if isinstance(value, list) else (value,)))
    return [text for text in texts if text.strip()]


def text_of(content: object) -> str:
    """The text of a message's `content`: a string, or its text parts; what is no text is left out.

    Some templates write parts without anything between them. Where a word may be cut between two, the
    text is there once more as these have it.
    """
    if isinstance(content, str):
        return content
    parts = [text for text in content_texts(content) if text]
    spaced = "\n".join(parts)
    cut = any(a[-1].isalnum() and b[0].isalnum() for a, b in pairwise(parts))
    return f"{spaced}\n{''.join(parts)}" if cut else spaced


def strings_in(value: Any) -> Iterator[str]:
    """The strings in a JSON value as they stand, keys before what they name, but for the protocol's words.

    A tool call's arguments are a string of JSON: what is in it is read, its escapes decoded, as templates do.
    """
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, str):
            if value and value not in _PROTOCOL:
                yield value
        elif isinstance(value, Mapping):
            for key, inner in reversed(list(value.items())):
                left += (_parsed(inner) if key == "arguments" else inner, key)
        elif isinstance(value, list | tuple):
            left.extend(reversed(value))


def _without_text(content: object) -> list[Any]:
    """The parts of a content without their texts, which are read already, and without media."""
    if not isinstance(content, Sequence):
        return []
    return [_without_media(item) if isinstance(item, Mapping) else item for item in content]


def _without_media(item: Mapping[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in item.items() if name != "text" or not isinstance(value, str)}
    for name, source in kept.items():
        url = source.get("url") if isinstance(source, Mapping) else None
        if isinstance(url, str) and _DATA_URL.match(url):
            kept[name] = {field: value for field, value in source.items() if field != "url"}
    return kept


def _parsed(arguments: Any) -> Any:
    if not isinstance(arguments, str):
        return arguments
    try:
        return orjson.loads(arguments)
    except orjson.JSONDecodeError:
        unescaped, rest = unescape(arguments)
        return unescaped + rest
