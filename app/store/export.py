"""Exports of a conversation, a message at a time: as JSON, all of it; as Markdown, its newest branch."""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import orjson

from app.store.conversation_view import Outline, messages, newest_branch, whole

Message = Mapping[str, Any]


class Format(NamedTuple):
    """A file format of conversations: the messages, and the text before, between and after them."""

    media_type: str
    suffix: str
    outline: Callable[[sqlite3.Connection, str, str], Outline]
    head: Callable[[Outline], bytes]
    render: Callable[[Sequence[Message]], bytes]
    separator: bytes
    tail: bytes


def document(
    connection: sqlite3.Connection, owner: str, conversation_id: str, layout: Format
) -> Iterator[bytes]:
    """A conversation as a layout has it, a message at a time. Raises NotFound."""
    outline = layout.outline(connection, owner, conversation_id)
    yield layout.head(outline)
    separator = b""
    for message in messages(connection, outline):
        yield separator + layout.render([message])
        separator = layout.separator
    yield layout.tail


def file_name(conversation: Mapping[str, Any], form: str) -> str:
    """A name for the file, of letters and digits that any system takes."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", conversation["title"])[:60].strip("-")
    return f"{words or conversation['id']}{FORMATS[form].suffix}"


def _json_head(outline: Outline) -> bytes:
    return orjson.dumps(outline.conversation)[:-1] + b',"messages":['


def _json_messages(shown: Sequence[Message]) -> bytes:
    return orjson.dumps(shown)[1:-1]


def _markdown_head(outline: Outline) -> bytes:
    """The title, and how many messages are not on this branch."""
    head = f"# {' '.join(outline.conversation['title'].split())}"
    if others := outline.num_others:
        head += f"\n\n*{others} more on other branches, which the JSON export has.*"
    return head.encode()


def _markdown_messages(shown: Sequence[Message]) -> bytes:
    blocks = []
    for message in shown:
        blocks += [f"## {message['role'].capitalize()}", *_blocks(message)]
        if message["status"] != "complete":
            blocks.append(f"*({message['status']})*")
    return "".join(f"\n\n{block}" for block in blocks).encode()


def _blocks(message: Message) -> list[str]:
    content = message["content"] or ""
    blocks = (
        [content] if isinstance(content, str) else [_content_part(content_part) for content_part in content]
    )
    blocks += [_call(call) for call in message.get("tool_calls", ())]
    return [block for block in blocks if block]


def _content_part(content_part: Mapping[str, Any]) -> str:
    if content_part["type"] == "text":
        text: str = content_part["text"]
        return text
    return f"*({content_part['type']})*"


def _call(call: Mapping[str, Any]) -> str:
    function = call["function"]
    return f"Calls `{function['name']}`:\n\n```json\n{function['arguments']}\n```"


VIEW = Format("application/json", ".json", whole, _json_head, _json_messages, b",", b"]}")
"""The format of `GET /api/conversations/{id}`."""
FORMATS: Mapping[str, Format] = {
    "json": VIEW,
    "markdown": Format(
        "text/markdown; charset=utf-8", ".md", newest_branch, _markdown_head, _markdown_messages, b"", b"\n"
    ),
}
"""The formats that a conversation can be exported in."""
