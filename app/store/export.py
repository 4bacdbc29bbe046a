"""A conversation to take away: as JSON, all of it; as Markdown, its newest branch."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import orjson

FORMATS = {"json": "application/json", "markdown": "text/markdown; charset=utf-8"}
"""The media type of each format."""

_SUFFIX = {"json": "json", "markdown": "md"}


def export(conversation: Mapping[str, Any], form: str) -> bytes:
    """A conversation, as `conversation_view.view` has it, in one of FORMATS."""
    if form == "json":
        return orjson.dumps(conversation, option=orjson.OPT_INDENT_2)
    return markdown(conversation).encode()


def file_name(conversation: Mapping[str, Any], form: str) -> str:
    """A name for the file, of letters and digits that any system takes."""
    words = re.sub(r"[^A-Za-z0-9]+", "-", conversation["title"])[:60].strip("-")
    return f"{words or conversation['id']}.{_SUFFIX[form]}"


def markdown(conversation: Mapping[str, Any]) -> str:
    """The branch of the newest message; the text says how many messages are not on it."""
    messages: Sequence[Mapping[str, Any]] = conversation["messages"]
    shown = newest_branch(messages)
    blocks = [f"# {' '.join(conversation['title'].split())}"]
    if others := len(messages) - len(shown):
        blocks.append(f"*{others} more on other branches, which the JSON export has.*")
    for message in shown:
        blocks += [f"## {message['role'].capitalize()}", *_blocks(message)]
        if message["status"] != "complete":
            blocks.append(f"*({message['status']})*")
    return "\n\n".join(blocks) + "\n"


def newest_branch(messages: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """From the top down to the newest message; of several answers to it, to the first."""
    if not messages:
        return []
    by_id = {message["id"]: message for message in messages}
    newest = messages[-1]
    shown = [newest if newest.get("choice", 0) == 0 else _first_choice(messages, newest)]
    while (parent_id := shown[-1]["parent_id"]) is not None:
        shown.append(by_id[parent_id])
    return shown[::-1]


def _first_choice(messages: Sequence[Mapping[str, Any]], of: Mapping[str, Any]) -> Mapping[str, Any]:
    return next(m for m in messages if m.get("request_id") == of["request_id"])


def _blocks(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content") or ""
    blocks = [content] if isinstance(content, str) else [_part(part) for part in content]
    blocks += [_call(call) for call in message.get("tool_calls", ())]
    return [block for block in blocks if block]


def _part(part: Mapping[str, Any]) -> str:
    if part["type"] == "text":
        text: str = part["text"]
        return text
    return f"*({part['type']})*"


def _call(call: Mapping[str, Any]) -> str:
    function = call.get("function", {})
    return f"Calls `{function.get('name')}`:\n\n```json\n{function.get('arguments')}\n```"
