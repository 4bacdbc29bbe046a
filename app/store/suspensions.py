"""Suspended requests: a server that stopped was answering them, and the next one can continue them.

The row of such a request in the ledger stays open, and its events are stored as far as they were released.
This table has everything else that a continuation needs, with the prompt, as long as it may be needed.
A request is suspended as long as it has a row here; the unit that deletes the row continues or settles it.
Every function is a unit of the store, or a part of one.
"""

from __future__ import annotations

import sqlite3
from typing import NamedTuple

from app.store import events, ledger
from app.store.events import StoredStream
from app.store.ledger import BillingTerms


class Suspension(NamedTuple):
    """The state from which a request is continued."""

    request_seq: int
    key_id: str | None
    """The API key that it was made with."""
    request: bytes
    """JSON: the request with its turn, and the progress of its answer (app.resume.snapshot)."""
    token_ids: bytes
    """uint32 in this machine's byte order: runs of token ids, of which the JSON has the lengths."""


class StoredSuspension(NamedTuple):
    """A suspended request as it is found again: with its stream, its bill's terms and its answers' ids."""

    suspension: Suspension
    stream: StoredStream
    terms: BillingTerms
    idempotency: tuple[str, bytes] | None
    """The idempotency key and its fingerprint."""
    answer_ids: list[str]
    """Ids of the messages that are to hold the answer, one a choice; none of a request that is not stored."""


def add(c: sqlite3.Connection, suspension: Suspension) -> bool:
    """Suspend an open request; returns whether it was open."""
    added = c.execute(
        "INSERT INTO suspended (request_seq, key_id, request, token_ids)"
        " SELECT seq, ?, ?, ? FROM requests WHERE seq = ? AND state = 'reserved' AND stream <> x''",
        (*suspension[1:], suspension.request_seq),
    )
    return added.rowcount == 1


def take(c: sqlite3.Connection, request_seq: int) -> bool:
    """End a suspension, and delete what was kept for it; returns whether the request was suspended."""
    return c.execute("DELETE FROM suspended WHERE request_seq = ?", (request_seq,)).rowcount == 1


def load(c: sqlite3.Connection, request_id: str, owner: str) -> StoredSuspension | None:
    """The owner's suspended request of that id; None when there is none, or it is not to be seen."""
    stream = events.load(c, request_id, owner)
    if stream is None:
        return None
    row = c.execute(
        "SELECT request_seq, key_id, request, token_ids FROM suspended WHERE request_seq = ?",
        (stream.request_seq,),
    ).fetchone()
    terms = ledger.terms_of(c, stream.request_seq)
    if row is None or terms is None:
        return None
    key = c.execute(
        "SELECT idempotency_key, fingerprint FROM requests WHERE seq = ? AND idempotency_key IS NOT NULL",
        (stream.request_seq,),
    ).fetchone()
    answers = c.execute("SELECT id FROM messages WHERE request_seq = ? ORDER BY choice", (row[0],))
    return StoredSuspension(Suspension(*row), stream, terms, key, [answer_id for (answer_id,) in answers])


def ids(c: sqlite3.Connection) -> dict[str, int]:
    """The ids of all suspended requests, and their seqs."""
    rows = c.execute("SELECT id, seq FROM suspended JOIN requests ON seq = request_seq ORDER BY seq")
    return dict(rows.fetchall())


def of_conversation(c: sqlite3.Connection, owner: str, conversation_id: str) -> list[str]:
    """The ids of the suspended requests of a conversation, oldest first."""
    rows = c.execute(
        "SELECT r.id FROM suspended AS s JOIN requests AS r ON r.seq = s.request_seq"
        " JOIN conversations AS c ON c.seq = r.conversation_seq"
        " WHERE c.id = ? AND c.owner = ? ORDER BY r.seq",
        (conversation_id, owner),
    )
    return [request_id for (request_id,) in rows]
