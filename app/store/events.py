"""Released events of streams as segments, and what it takes to replay them.

A live stream's new events are appended at each checkpoint; once it is settled one segment replaces
them. The ring alone reads a segment (app.stream.ring, `dump` and `restore`). A request
whose `stream` is empty has been forgotten: nothing can be replayed, only its counts are left.
Every function is a unit of the store, or a part of one.
"""

from __future__ import annotations

import sqlite3
from dataclasses import dataclass

from app.core import Usage

LIMIT = 500
"""Requests that one `forget_unstored` takes on, so that it does not hold the writer for long."""

# Soft-deleted conversations are hidden at once, purged ones are no longer there.
_VISIBLE = (
    "stream <> x'' AND (conversation_seq IS NULL OR EXISTS (SELECT 1 FROM conversations"
    " WHERE conversations.seq = conversation_seq AND deleted_at_us IS NULL))"
)


@dataclass(frozen=True, slots=True)
class StoredStream:
    """A request's row, as far as a replay needs it, and its events."""

    request_seq: int
    request_id: str
    owner: str
    model: str
    created_at_us: int
    state: str
    finish: str | None
    usage: Usage
    reconciled: bool
    """Settled at its checkpoint, because the process that generated it died."""
    stream: bytes
    """JSON: what it takes to write the stream's frames again."""
    segments: list[bytes]


def append(c: sqlite3.Connection, request_seq: int, first_id: int, segment: bytes) -> None:
    """Keep a segment; it replaces the one that began at the same event, which it contains."""
    c.execute(
        "INSERT INTO events (request_seq, first_id, slice) VALUES (?, ?, ?)"
        " ON CONFLICT DO UPDATE SET slice = excluded.slice",
        (request_seq, first_id, segment),
    )


def compact(c: sqlite3.Connection, request_seq: int, first_id: int, segment: bytes) -> None:
    """Put one segment, which reaches to the stream's end, in the place of all from `first_id` on."""
    c.execute("DELETE FROM events WHERE request_seq = ? AND first_id >= ?", (request_seq, first_id))
    append(c, request_seq, first_id, segment)


def segments(c: sqlite3.Connection, request_seq: int) -> list[bytes]:
    """A request's segments, oldest first."""
    rows = c.execute("SELECT slice FROM events WHERE request_seq = ? ORDER BY first_id", (request_seq,))
    return [segment for (segment,) in rows]


def load(c: sqlite3.Connection, request_id: str, owner: str) -> StoredStream | None:
    """The owner's request of that id with its events; None when there is none to replay."""
    row = c.execute(
        "SELECT seq, id, owner, model, created_at_us, state, outcome, reconciled, stream, prompt_tokens,"  # noqa: S608  # a constant
        " completion_tokens, cached_tokens, reasoning_tokens, withheld_tokens"
        f" FROM requests WHERE id = ? AND owner = ? AND {_VISIBLE}",
        (request_id, owner),
    ).fetchone()
    if row is None:
        return None
    described: tuple[int, str, str, str, int, str, str | None] = row[:7]
    reconciled, stream, *usage = row[7:]
    return StoredStream(*described, Usage(*usage), bool(reconciled), stream, segments(c, row[0]))


def visible(c: sqlite3.Connection, request_id: str, owner: str) -> int | None:
    """The seq of the owner's request of that id; None when there is none to replay."""
    row = c.execute(
        f"SELECT seq FROM requests WHERE id = ? AND owner = ? AND {_VISIBLE}",  # noqa: S608  # a constant
        (request_id, owner),
    ).fetchone()
    return None if row is None else row[0]


def is_erased(c: sqlite3.Connection, request_seq: int) -> bool:
    """True if its owner has deleted the request, or it has been forgotten."""
    row = c.execute("SELECT stream = x'' FROM requests WHERE seq = ?", (request_seq,)).fetchone()
    return bool(row and row[0])


def find_by_key(c: sqlite3.Connection, owner: str, key: str) -> tuple[str, bytes] | None:
    """The id and fingerprint of the newest request made with an idempotency key, settled or suspended."""
    row: tuple[str, bytes] | None = c.execute(
        "SELECT id, fingerprint FROM requests"  # noqa: S608  # a constant
        f" WHERE owner = ? AND idempotency_key = ? AND {_VISIBLE}"
        " AND (state = 'settled' OR EXISTS (SELECT 1 FROM suspended WHERE request_seq = seq))"
        " ORDER BY seq DESC LIMIT 1",
        (owner, key),
    ).fetchone()
    return row


def free_idempotency_key(c: sqlite3.Connection, request_seq: int) -> None:
    """Free the request's idempotency key for another: its caller was asked to send it again."""
    c.execute("UPDATE requests SET idempotency_key = NULL, fingerprint = NULL WHERE seq = ?", (request_seq,))


def forget_segments(c: sqlite3.Connection, request_seq: int) -> None:
    """Delete a request's segments."""
    c.execute("DELETE FROM events WHERE request_seq = ?", (request_seq,))


def forget(c: sqlite3.Connection, request_seq: int) -> None:
    """Delete a request's segments, and what it was suspended with; the row stays."""
    forget_segments(c, request_seq)
    c.execute("DELETE FROM suspended WHERE request_seq = ?", (request_seq,))


def erase(c: sqlite3.Connection, request_seq: int) -> None:
    """Delete every text of a request's answers; the counts stay, and its place in a conversation.

    Its words in the search index are out of the files after the next purge (app.store.purge).
    """
    forget(c, request_seq)
    free_idempotency_key(c, request_seq)
    c.execute("UPDATE requests SET stream = x'' WHERE seq = ?", (request_seq,))
    answers = c.execute(
        "UPDATE messages SET text = '', body = NULL, answer_ids = NULL, prompt_ids = NULL, status = 'deleted'"
        " WHERE request_seq = ?",
        (request_seq,),
    )
    if answers.rowcount > 0:
        c.execute(f"PRAGMA user_version={num_erased(c) + 1}")


def num_erased(c: sqlite3.Connection) -> int:
    """Answers erased since a purge last took the words of such ones out of the index."""
    number: int = c.execute("PRAGMA user_version").fetchone()[0]
    return number


_UNSTORED = (
    "SELECT seq FROM requests WHERE conversation_seq IS NULL AND state = 'settled'"
    " AND stream <> x'' AND settled_at_us < ? ORDER BY settled_at_us LIMIT ?"
)


def has_unstored(c: sqlite3.Connection, settled_before_us: int) -> bool:
    """True if `forget_unstored` would find a request."""
    return c.execute(_UNSTORED, (settled_before_us, 1)).fetchone() is not None


def forget_unstored(c: sqlite3.Connection, settled_before_us: int) -> int:
    """Forget the oldest requests without a conversation that were settled before then.

    Their events and idempotency keys are deleted, their counts stay. Returns how many they were, at
    most LIMIT: as long as it is LIMIT, there may be more.
    """
    rows = c.execute(_UNSTORED, (settled_before_us, LIMIT)).fetchall()
    c.executemany("DELETE FROM events WHERE request_seq = ?", rows)
    c.executemany(
        "UPDATE requests SET stream = x'', idempotency_key = NULL, fingerprint = NULL WHERE seq = ?", rows
    )
    return len(rows)
