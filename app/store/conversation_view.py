"""A whole conversation with all its branches, as one object."""

from __future__ import annotations

import sqlite3
from typing import Any

import orjson

from app.store.conversation_list import listed
from app.store.conversations import find
from app.store.ledger import Usage
from app.store.usage_body import usage_body


def view(connection: sqlite3.Connection, owner: str, conversation_id: str) -> dict[str, Any]:
    """The conversation and its messages, oldest first, each with its parent. Raises NotFound.

    A message's content is what was sent, a string or a list of parts. The usage of a request
    stands on its first answer only, so that sums over messages are right. An answer in
    progress has no text here yet.
    """
    found = listed(connection, owner, conversation_id)
    rows = connection.execute(
        "SELECT m.id, p.id, m.role, m.text, m.body, m.created_at_us, m.status, m.finish_reason, m.choice,"
        " r.id, r.state, r.prompt_tokens, r.completion_tokens, r.cached_tokens, r.reasoning_tokens,"
        " r.withheld_tokens"
        " FROM messages AS m LEFT JOIN messages AS p ON p.seq = m.parent_seq"
        " LEFT JOIN requests AS r ON r.seq = m.request_seq"
        " WHERE m.conversation_seq = ? ORDER BY m.seq",
        (find(connection, owner, conversation_id),),
    )
    return found | {"messages": [_message(*row) for row in rows]}


def _message(
    message_id: str,
    parent_id: str | None,
    role: str,
    text: str,
    body: bytes | None,
    created_at_us: int,
    status: str,
    finish_reason: str | None,
    choice: int,
    request_id: str | None,
    *ledger: Any,
) -> dict[str, Any]:
    sent: dict[str, Any] = {"role": role, "content": text} if body is None else orjson.loads(body)
    message = {"id": message_id, "parent_id": parent_id} | sent
    message |= {"created_at": created_at_us // 1_000_000, "status": status, "finish_reason": finish_reason}
    state, *counts = ledger
    message["usage"] = usage_body(Usage(*counts)) if state == "settled" and choice == 0 else None
    if request_id is not None:
        message |= {"request_id": request_id, "choice": choice}
    return message
