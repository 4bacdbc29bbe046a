"""Conversations as the server has them: lists, messages, and the branch of a message."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from app.cli.client_options import Server

ROOT = "root"
"""`parent_id` of a first turn beside the first."""
_PAGE = 100
Message = Mapping[str, Any]


def listed(server: Server) -> dict[str, Any]:
    """The newest conversations, as `GET /api/conversations` has them. Raises Unreachable, Refused."""
    page: dict[str, Any] = server.call("GET", f"/api/conversations?limit={_PAGE}")
    return page


def newest_id(server: Server) -> str | None:
    """The conversation with the newest turn, of the newest hundred."""
    newest = max(listed(server)["data"], key=lambda each: each["updated_at"], default=None)
    return newest and newest["id"]


def messages_of(server: Server, conversation_id: str) -> list[Message]:
    """All messages, oldest first. Raises Unreachable, Refused."""
    messages: list[Message] = server.call("GET", f"/api/conversations/{quote(conversation_id, safe='')}")[
        "messages"
    ]
    return messages


def branch(messages: Sequence[Message], leaf_id: str | None) -> list[Message]:
    """The messages from the first to the leaf; without a leaf, to the newest answer."""
    by_id = {message["id"]: message for message in messages}
    if leaf_id is None:
        answers = [message for message in messages if message["role"] == "assistant"]
        with_text = [m for m in answers if m.get("content") or m["status"] == "in_progress"]
        leaf_id = (with_text or answers or [{"id": None}])[-1]["id"]
    line = []
    while leaf_id in by_id:
        line.append(by_id[leaf_id])
        leaf_id = by_id[leaf_id]["parent_id"]
    return line[::-1]


def last_question(line: Sequence[Message]) -> Message | None:
    """The last message of the user's in a branch."""
    return next((message for message in reversed(line) if message["role"] == "user"), None)


def split(message: Message) -> tuple[str, list[dict[str, Any]]]:
    """The text of a message, and its images."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content, []
    texts = [item["text"] for item in content if item.get("type") == "text"]
    return "\n".join(texts), [item for item in content if item.get("type") != "text"]


def text_of(message: Message) -> str:
    """The text of a message below its images, each of which is a word."""
    text, images = split(message)
    return "\n".join([*("[image]" for _ in images), *filter(None, [text])])
