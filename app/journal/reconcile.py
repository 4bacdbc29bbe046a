"""Requests that a process left open are settled at their last checkpoint."""

from __future__ import annotations

import sqlite3
import time

from app.journal.entry import finished_answer
from app.store import conversations, events, ledger, suspensions
from app.store.conversations import Status
from app.store.database import Database
from app.store.ledger import Settlement, UnsettledRequest
from app.stream.ring import Ring
from app.stream.transcript import ChoiceMessage, build_messages

_UNLIMITED_BYTES = 1 << 40


async def reconcile(database: Database) -> int:
    """Settle what a dead process left open and did not suspend. Returns how many requests.

    Raises StorageUnavailable.
    """

    def unit(connection: sqlite3.Connection) -> int:
        left = ledger.unsettled_requests(connection)
        for request in left:
            settle_open(connection, request)
        return len(left)

    return await database.write(unit)


def settle_open(
    connection: sqlite3.Connection,
    left: UnsettledRequest,
    finish: str = "interrupted",
    status: Status = "interrupted",
) -> None:
    """Settle an open request at its last checkpoint, with what was released of it then.

    Without a checkpoint its prompt is billed as not cached, and no output.
    """
    at_us = time.time_ns() // 1000
    suspensions.take(connection, left.seq)
    ledger.settle(connection, Settlement(left.seq, left.usage, finish, at_us, reconciled=True))
    events.free_idempotency_key(connection, left.seq)
    erased = events.is_erased(connection, left.seq)
    stored = {} if erased else stored_answers(connection, left.seq)
    finished = [
        finished_answer(answer_id, stored.get(choice, ChoiceMessage()), status)
        for answer_id, choice in conversations.answers_of(connection, left.seq)
    ]
    conversations.finish_answers(connection, finished, at_us, left.usage.reported_tokens)
    if left.usage.all_withheld:  # it is not billed, so nobody is to get it later either
        events.forget_segments(connection, left.seq)
    if erased:
        events.erase(connection, left.seq)  # what was checkpointed after it was deleted, too


def stored_answers(connection: sqlite3.Connection, request_seq: int) -> dict[int, ChoiceMessage]:
    """The answers in a request's stored events, up to the first gap; none where the events are damaged."""
    try:
        ring = Ring.restore(events.segments(connection, request_seq), _UNLIMITED_BYTES, only_prefix=True)
    except ValueError:
        return {}  # a replay says so (app.stream.replay); it must not keep the server from starting
    return build_messages(*ring.contents())
