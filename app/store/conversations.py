"""Conversations as trees of messages: how a turn is written, and the branch the next one continues.

A regenerated or edited turn is another child of its parent; nothing is overwritten. A message's
`seq` is above its parent's, so a branch in order of `seq` is in order of speech.

If an answer is not complete, the model reads its text, without tool calls, which may be cut. An answer
without text is left out together with the messages that it was to answer, because many templates refuse two
turns of one speaker in a row; so is a turn that safety blocked, even where some of its answer was released.
None is ever removed from the tree. An answer and those that continue it are read as one message.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from app.errors import BadRequest, NotFound
from app.messages import as_kept

Status = Literal["complete", "in_progress", "cancelled", "interrupted", "failed", "blocked", "deleted"]

ROOT = "root"
"""The `parent_id` that begins again above the first message."""
MAX_BRANCH_MESSAGES = 10_000
"""Messages that a turn can continue; fewer where a request sends them all (app.api.schema.parameters)."""
MAX_BRANCH_BYTES = 32 * 1024**2
"""Text, images and token ids that a turn can continue; where the model sees, a body may have as much."""
_ANCESTORS = (
    "WITH RECURSIVE path (seq, parent_seq) AS ("
    " SELECT seq, parent_seq FROM messages WHERE seq = ? UNION ALL"
    " SELECT m.seq, m.parent_seq FROM path JOIN messages AS m ON m.seq = path.parent_seq LIMIT ?)"
    " SELECT seq FROM path"
)
"""A message and those above it, upwards, at most so many. A parent's seq is below its child's."""
_IMAGE = '"type":"image_url"'
"""The mark of an image in a stored message; inside a text its quotes would be escaped."""


@dataclass(frozen=True, slots=True)
class NewMessage:
    """A message as it was sent. `text` is what is searched; `body` the JSON of one that is more."""

    id: str
    role: str
    text: str
    body: bytes | None = None


@dataclass(frozen=True, slots=True)
class NewTurn:
    """New messages below `parent_seq`, and the ids of the answers awaited, one a choice."""

    conversation_id: str
    owner: str
    model: str
    title: str
    is_new: bool
    parent_seq: int | None
    messages: Sequence[NewMessage]
    answer_ids: Sequence[str]
    created_at_us: int


@dataclass(frozen=True, slots=True)
class FinishedAnswer:
    """An answer as it ended. `answer_ids` and `prompt_ids` are little-endian uint32.

    `prompt_ids` are those after the sequence of message `base_seq`; all of them where it is None.
    """

    id: str
    text: str
    body: bytes | None
    status: Status
    finish_reason: str | None
    answer_ids: bytes
    prompt_ids: bytes
    base_seq: int | None


@dataclass(frozen=True, slots=True)
class Branch:
    """The branch that the next turn continues.

    `messages` are OpenAI's, oldest first, with `parent_seq` and `last_id` of the message that
    new ones go below (None at the top). `runs` are the stored token ids of the newest answer's
    sequence, oldest first: each the `seq` of an answer and its ids after the run before it.
    `strikes` is how many turns of the conversation safety has blocked, on whichever branch. `answered` is
    whether each message is an answer of this server; None for an imported one, of either side.
    """

    conversation_seq: int
    parent_seq: int | None
    last_id: str | None
    messages: list[dict[str, Any]]
    runs: list[tuple[int, bytes]]
    strikes: int = 0
    answered: Sequence[bool | None] = ()
    num_bytes: int = 0
    """The size of the messages."""


def ensure(connection: sqlite3.Connection, turn: NewTurn) -> int:
    """The conversation's seq; a new one is inserted. Raises NotFound when it was deleted meanwhile."""
    if not turn.is_new:
        return find(connection, turn.owner, turn.conversation_id)
    at_us = turn.created_at_us
    cursor = connection.execute(
        "INSERT INTO conversations (id, owner, title, model, created_at_us, updated_at_us)"
        " VALUES (?, ?, ?, ?, ?, ?)",
        (turn.conversation_id, turn.owner, turn.title, turn.model, at_us, at_us),
    )
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def find(connection: sqlite3.Connection, owner: str, conversation_id: str) -> int:
    """The seq of a conversation that is not deleted. Raises NotFound."""
    row = connection.execute(
        "SELECT seq FROM conversations WHERE id = ? AND owner = ? AND deleted_at_us IS NULL",
        (conversation_id, owner),
    ).fetchone()
    if row is None:
        raise no_conversation(conversation_id)
    seq: int = row[0]
    return seq


def no_conversation(conversation_id: str) -> NotFound:
    """The error for a conversation that its caller cannot see, whatever the reason."""
    return NotFound(
        f"There is no conversation {conversation_id!r}.",
        code="conversation_not_found",
        param="conversation_id",
    )


def add_turn(
    connection: sqlite3.Connection, turn: NewTurn, conversation_seq: int, request_seq: int | None
) -> None:
    """Chain the turn's messages below its parent, and its answers, in progress, below the last."""
    insert = (
        "INSERT INTO messages (id, conversation_seq, parent_seq, role, text, body, created_at_us,"
        " status, request_seq, choice) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
    )
    parent_seq = turn.parent_seq
    at_us = turn.created_at_us
    for m in turn.messages:
        sent = (m.id, conversation_seq, parent_seq, m.role, m.text, m.body, at_us, "complete", None, 0)
        parent_seq = connection.execute(insert, sent).lastrowid
    for choice, answer_id in enumerate(turn.answer_ids):
        awaited = ("assistant", "", None, at_us, "in_progress", request_seq, choice)
        connection.execute(insert, (answer_id, conversation_seq, parent_seq, *awaited))
    if not turn.is_new:
        connection.execute(
            "UPDATE conversations SET model = ?, updated_at_us = max(updated_at_us, ?) WHERE seq = ?",
            (turn.model, at_us, conversation_seq),
        )


def add_blocked_turn(connection: sqlite3.Connection, turn: NewTurn) -> None:
    """Keep a turn that was refused before it had a request: its messages, and empty answers.

    Nothing happens to one that would begin a conversation. Raises NotFound.
    """
    if turn.is_new:
        return
    add_turn(connection, turn, ensure(connection, turn), None)
    connection.executemany(
        "UPDATE messages SET status = 'blocked', finish_reason = 'content_filter' WHERE id = ?",
        [(answer_id,) for answer_id in turn.answer_ids],
    )


def finish_answers(
    connection: sqlite3.Connection, answers: Sequence[FinishedAnswer], at_us: int, total_tokens: int
) -> None:
    """Store what the answers of one request became, and add its `total_tokens` to the conversation.

    Nothing happens to answers that were purged meanwhile.
    """
    for a in answers:
        connection.execute(
            "UPDATE messages SET text = ?, body = ?, status = ?, finish_reason = ?, answer_ids = ?,"
            " prompt_ids = ?, base_seq = ? WHERE id = ?",
            (a.text, a.body, a.status, a.finish_reason, a.answer_ids, a.prompt_ids, a.base_seq, a.id),
        )
    if answers:
        connection.execute(
            "UPDATE conversations SET total_tokens = total_tokens + ?,"
            " updated_at_us = max(updated_at_us, ?)"
            " WHERE seq = (SELECT conversation_seq FROM messages WHERE id = ?)",
            (total_tokens, at_us, answers[0].id),
        )


def branch(connection: sqlite3.Connection, owner: str, conversation_id: str, parent_id: str | None) -> Branch:
    """The branch that ends in message `parent_id`; without one, in the newest answer.

    Where no answer has any text yet, the messages that the first ones were to answer are left out, but
    for system messages. `ROOT` is the empty branch. Raises NotFound, BadRequest.
    """
    conversation_seq = find(connection, owner, conversation_id)
    if parent_id == ROOT:
        return Branch(conversation_seq, None, None, [], [])
    path = _path(connection, _leaf(connection, conversation_seq, parent_id))
    visible = _visible_to_model(path)
    if parent_id is None:
        path = visible
    messages, answered = _as_read(visible)
    return Branch(
        conversation_seq=conversation_seq,
        parent_seq=path[-1].seq if path else None,
        last_id=path[-1].id if path else None,
        messages=messages,
        runs=_runs(visible),
        strikes=_strikes(connection, conversation_seq),
        answered=answered,
        num_bytes=sum(len(row.text) + len(row.body or b"") for row in visible),
    )


class BranchSummary(NamedTuple):
    """A summary of a branch: the last model, its tokens, the user's turns, and whether it has images."""

    model: str | None = None
    tokens: int = 0
    turns: int = 0
    images: bool = False


def summarize_branch(
    connection: sqlite3.Connection, owner: str, conversation_id: str, parent_id: str | None
) -> BranchSummary:
    """The branch in numbers, as its last answer was billed. Raises NotFound."""
    conversation_seq = find(connection, owner, conversation_id)
    if parent_id == ROOT:
        return BranchSummary()
    rows = connection.execute(
        "SELECT m.role, coalesce(instr(m.body, ?), 0) > 0, r.model, r.prompt_tokens + r.completion_tokens"  # noqa: S608  # a constant
        f" FROM messages AS m LEFT JOIN requests AS r ON r.seq = m.request_seq WHERE m.seq IN ({_ANCESTORS})"
        " ORDER BY m.seq DESC",
        (_IMAGE, _leaf(connection, conversation_seq, parent_id), MAX_BRANCH_MESSAGES),
    ).fetchall()
    model, tokens = next((row[2:] for row in rows if row[2] is not None), (None, 0))
    return BranchSummary(model, tokens, sum(row[0] == "user" for row in rows), any(row[1] for row in rows))


@dataclass(frozen=True, slots=True)
class _MessageRow:
    """A message on a branch, as stored."""

    seq: int
    id: str
    role: str
    text: str
    body: bytes | None
    status: Status
    answer_ids: bytes | None
    prompt_ids: bytes | None
    base_seq: int | None
    request_seq: int | None
    imported: bool

    @property
    def size_bytes(self) -> int:
        ids = len(self.answer_ids or b"") + len(self.prompt_ids or b"")
        return len(self.text) + len(self.body or b"") + ids

    @property
    def left_out(self) -> bool:
        return self.status == "blocked" or (self.status != "complete" and not self.text)


_HAS_TEXT = "(status = 'complete' OR (text <> '' AND status <> 'blocked'))"
_NEWEST_ANSWER = (
    "SELECT seq FROM messages WHERE request_seq = (SELECT request_seq FROM messages"  # noqa: S608  # a constant
    f" WHERE conversation_seq = ?1 AND request_seq IS NOT NULL AND {_HAS_TEXT} ORDER BY seq DESC LIMIT 1)"
    f" AND {_HAS_TEXT} ORDER BY choice LIMIT 1"
)
"""The first choice with text of the newest request that has one."""
_NEWEST = "SELECT seq FROM messages WHERE conversation_seq = ?1 ORDER BY seq DESC LIMIT 1"


def _leaf(connection: sqlite3.Connection, conversation_seq: int, parent_id: str | None) -> int | None:
    """The message that a branch ends in. Raises NotFound."""
    if parent_id is None:
        query = f"SELECT coalesce(({_NEWEST_ANSWER}), ({_NEWEST}))"
        leaf: int | None = connection.execute(query, (conversation_seq,)).fetchone()[0]
        return leaf
    row: tuple[int] | None = connection.execute(
        "SELECT seq FROM messages WHERE id = ? AND conversation_seq = ?", (parent_id, conversation_seq)
    ).fetchone()
    if row is None:
        raise NotFound(
            f"The conversation has no message {parent_id!r}.", code="message_not_found", param="parent_id"
        )
    return row[0]


def _path(connection: sqlite3.Connection, leaf_seq: int | None) -> list[_MessageRow]:
    """The messages from the top down to `leaf_seq`. Raises BadRequest where they are too much."""
    rows = connection.execute(
        "SELECT seq, id, role, text, body, status, answer_ids, prompt_ids, base_seq, request_seq, imported"  # noqa: S608  # a constant
        f" FROM messages WHERE seq IN ({_ANCESTORS}) ORDER BY seq",
        (leaf_seq, MAX_BRANCH_MESSAGES + 1),
    )
    path, size_bytes = [], 0
    for row in rows:
        path.append(_MessageRow(*row))
        size_bytes += path[-1].size_bytes
        if size_bytes > MAX_BRANCH_BYTES:
            raise _too_long(f"{MAX_BRANCH_BYTES >> 20} MiB")
    if len(path) > MAX_BRANCH_MESSAGES:
        raise _too_long(f"{MAX_BRANCH_MESSAGES:,} messages")
    return path


def _too_long(bound: str) -> BadRequest:
    return BadRequest(
        f"This branch of the conversation is over {bound}, more than a turn can continue. Begin a new"
        " conversation, or name an earlier message as parent_id.",
        code="conversation_too_long",
        param="conversation_id",
    )


def _visible_to_model(path: Sequence[_MessageRow]) -> list[_MessageRow]:
    """The messages of a path that the model reads."""
    visible: list[_MessageRow] = []
    for row in path:
        if not row.left_out:
            visible.append(row)
            continue
        while visible and visible[-1].role in ("user", "tool"):
            visible.pop()
    return visible


def _as_read(visible: Sequence[_MessageRow]) -> tuple[list[dict[str, Any]], list[bool | None]]:
    """The messages for the model, and which are answers; an answer and those that continue it are one."""
    messages: list[dict[str, Any]] = []
    answered: list[bool | None] = []
    for row in visible:
        message = _as_sent(row)
        last = messages[-1] if messages else {}
        continues = row.request_seq is not None and last.get("role") == "assistant"
        if continues and isinstance(last["content"], str) and isinstance(message["content"], str):
            messages[-1] = last | message | {"content": last["content"] + message["content"]}
            continue
        messages.append(message)
        answered.append(None if row.imported else row.request_seq is not None)
    return messages, answered


def _as_sent(row: _MessageRow) -> dict[str, Any]:
    message = as_kept(row.role, row.text, row.body)
    if row.status != "complete":
        message.pop("tool_calls", None)
    return message


def _runs(visible: Sequence[_MessageRow]) -> list[tuple[int, bytes]]:
    answers = {row.seq: row for row in visible if row.answer_ids}
    runs: list[tuple[int, bytes]] = []
    seq: int | None = max(answers, default=None)
    while seq is not None:
        row = answers.pop(seq, None)  # each is there once, so that this ends
        if row is None:  # a part is missing: what follows it is no prompt's beginning
            return []
        runs.append((seq, (row.prompt_ids or b"") + (row.answer_ids or b"")))
        seq = row.base_seq
    return runs[::-1]


def _strikes(connection: sqlite3.Connection, conversation_seq: int) -> int:
    number: int = connection.execute(
        "SELECT count(*) FROM messages"
        " WHERE conversation_seq = ? AND status = 'blocked' AND role = 'assistant' AND choice = 0",
        (conversation_seq,),
    ).fetchone()[0]
    return number


def answers_of(connection: sqlite3.Connection, request_seq: int) -> list[tuple[str, int]]:
    """The ids and choices of a request's answers."""
    query = "SELECT id, choice FROM messages WHERE request_seq = ? ORDER BY choice"
    return connection.execute(query, (request_seq,)).fetchall()
