"""Requests that a process left open: they are settled at their last checkpoint."""

from __future__ import annotations

import sqlite3
import time

from app.generation.journal_entry import Ids, finished_answer
from app.store import conversations, events, ledger, suspensions
from app.store.conversations import Status
from app.store.ledger import OpenRequest, Settlement
from app.stream.ring import Ring
from app.stream.transcript import ChoiceMessage, answers

_EVERYTHING = 1 << 40


def settle_open(
    connection: sqlite3.Connection,
    left: OpenRequest,
    outcome: str = "interrupted",
    status: Status = "interrupted",
) -> None:
    """Settle an open request at its last checkpoint, with what was released of it then."""
    at_us = time.time_ns() // 1000
    suspensions.take(connection, left.seq)
    ledger.settle(connection, Settlement(left.seq, left.usage, outcome, at_us, reconciled=True))
    events.free_key(connection, left.seq)
    erased = events.is_erased(connection, left.seq)
    heard = {} if erased else stored_answers(connection, left.seq)
    finished = [
        finished_answer(answer_id, heard.get(choice, ChoiceMessage()), status, Ids())
        for answer_id, choice in conversations.answers_of(connection, left.seq)
    ]
    tokens = left.usage.reported_tokens
    conversations.finish_answers(connection, finished, at_us, tokens)
    if erased:
        events.erase(connection, left.seq)  # what was checkpointed after it was deleted, too


def stored_answers(connection: sqlite3.Connection, request_seq: int) -> dict[int, ChoiceMessage]:
    """What the stored events of a request say, up to the first gap; nothing where they are damaged."""
    try:
        ring = Ring.restore(events.segments(connection, request_seq), _EVERYTHING, only_prefix=True)
    except ValueError:
        return {}  # a replay says so (app.stream.replay); it must not keep the server from starting
    return answers(*ring.whole())
