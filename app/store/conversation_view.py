"""A conversation's messages as they are shown: a page at a time, so that its length costs no memory.

First the *outline*: which messages, by their `seq`, a few bytes each. Then pages of them, oldest
first. A message is shown with its known keys; where the server has a key of its own of that name, that wins.
"""

from __future__ import annotations

import sqlite3
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import orjson

from app.core import Usage, known_finish
from app.messages import as_kept
from app.store.conversation_list import listed
from app.store.conversations import find
from app.store.usage import usage_body

PAGE_BYTES = 1 << 20
"""Stored text and bodies of a page; one message may be more."""
PAGE_MESSAGES = 256


@dataclass(frozen=True, slots=True)
class Outline:
    """A conversation as it is listed, and the seqs of the messages to show, oldest first.

    `num_others` are its messages on other branches.
    """

    conversation: dict[str, Any]
    seqs: Sequence[int]
    num_others: int = 0


class MessagePage(NamedTuple):
    """Messages, and where in the outline the next page begins; None after the last."""

    messages: list[dict[str, Any]]
    next_start: int | None


def whole(connection: sqlite3.Connection, owner: str, conversation_id: str) -> Outline:
    """All messages of all branches. Raises NotFound."""
    conversation_seq = find(connection, owner, conversation_id)
    return Outline(listed(connection, owner, conversation_id), _all(connection, conversation_seq))


def newest_branch(connection: sqlite3.Connection, owner: str, conversation_id: str) -> Outline:
    """The branch down to the newest message, or to the first of several answers. Raises NotFound."""
    everything = whole(connection, owner, conversation_id)
    if not everything.seqs:
        return everything
    rows = connection.execute(
        "WITH RECURSIVE path (seq, parent_seq) AS ("
        " SELECT seq, parent_seq FROM messages WHERE seq = ? UNION ALL"
        " SELECT m.seq, m.parent_seq FROM path JOIN messages AS m"
        # Smaller at every step, so that the walk ends, whatever a row says.
        " ON m.seq = path.parent_seq AND m.seq < path.seq)"
        " SELECT seq FROM path",
        (_first_choice(connection, everything.seqs[-1]),),
    )
    branch = array("q", (seq for (seq,) in rows))
    branch.reverse()
    return Outline(everything.conversation, branch, len(everything.seqs) - len(branch))


def page(connection: sqlite3.Connection, outline: Outline, start: int) -> MessagePage:
    """The messages of an outline from `start` on; those purged meanwhile are left out.

    A message's content is what was sent, a string or a list of parts. The usage of a request
    is on its first answer only, so that sums over messages are right. An answer in
    progress has no text here yet.
    """
    seqs = list(outline.seqs[start : start + PAGE_MESSAGES])
    cursor = connection.execute(
        "SELECT m.seq, m.id, m.role, m.text, m.body, m.created_at_us, m.status, m.finish_reason, m.choice,"
        " p.id AS parent_id, r.id AS request_id, r.model, r.state, r.prompt_tokens, r.completion_tokens,"
        " r.cached_tokens, r.reasoning_tokens, r.withheld_tokens"
        " FROM messages AS m LEFT JOIN messages AS p ON p.seq = m.parent_seq"
        " LEFT JOIN requests AS r ON r.seq = m.request_seq"
        " WHERE m.seq IN (SELECT value FROM json_each(?)) ORDER BY m.seq",
        (orjson.dumps(seqs).decode(),),
    )
    messages: list[dict[str, Any]] = []
    size_bytes = 0
    for values in cursor:
        row = sqlite3.Row(cursor, values)
        messages.append(_message(row))
        size_bytes += len(row["text"]) + len(row["body"] or b"")
        if size_bytes >= PAGE_BYTES and row["seq"] != seqs[-1]:
            return MessagePage(messages, start + seqs.index(row["seq"]) + 1)
    end = start + len(seqs)
    return MessagePage(messages, end if end < len(outline.seqs) else None)


def messages(connection: sqlite3.Connection, outline: Outline) -> Iterator[dict[str, Any]]:
    """The messages of an outline, read as they are asked for."""
    start: int | None = 0
    while start is not None:
        shown, start = page(connection, outline, start)
        yield from shown


def _all(connection: sqlite3.Connection, conversation_seq: int) -> Sequence[int]:
    rows = connection.execute(
        "SELECT seq FROM messages WHERE conversation_seq = ? ORDER BY seq", (conversation_seq,)
    )
    return array("q", (seq for (seq,) in rows))


def _first_choice(connection: sqlite3.Connection, seq: int) -> int:
    """The first of a request's answers; for any other message, that message."""
    row = connection.execute(
        "SELECT min(a.seq) FROM messages AS m JOIN messages AS a ON a.request_seq = m.request_seq"
        " AND a.parent_seq IS m.parent_seq WHERE m.seq = ?",
        (seq,),
    ).fetchone()
    return seq if row[0] is None else int(row[0])


def _message(row: sqlite3.Row) -> dict[str, Any]:
    message = {"id": row["id"], "parent_id": row["parent_id"]}
    message |= as_kept(row["role"], row["text"], row["body"])
    message |= {"created_at": row["created_at_us"] // 1_000_000, "status": row["status"]}
    message["finish_reason"] = known_finish(row["finish_reason"])
    billed = row["state"] == "settled" and row["choice"] == 0
    message["usage"] = usage_body(Usage(*(row[name] for name in Usage._fields))) if billed else None
    if row["request_id"] is not None:
        message |= {"request_id": row["request_id"], "choice": row["choice"], "model": row["model"]}
    return message
