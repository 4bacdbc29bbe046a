"""The unit that writes an entry's settlement, with its counts and events as of when the unit was made.

Whether its stream has been deleted since is looked at as it is written.

`Journal.settle` writes it before a stream's [DONE], and `Journal.settle_later` after an error. If it cannot
be written, `Journal._settle_left` tries again every second; the next start reconciles what is left then. A
retry bills nothing twice: app.store.ledger changes a reservation that is still open, and no other row.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping

from app.errors import InternalError, Unavailable
from app.journal.entry import JournalEntry
from app.journal.reconcile import stored_answers
from app.store import conversations, events
from app.store.ledger import Settlement, SettleUnit
from app.stream.token_stream import DELETED
from app.stream.transcript import ChoiceMessage, build_messages


def settlement_of(entry: JournalEntry) -> SettleUnit:
    """The unit that settles an entry. It returns the completion tokens that the row has then."""
    stream, request_seq = entry.stream, entry.request_seq
    assert request_seq is not None
    at_us = time.time_ns() // 1000
    usage = entry.usage(unreleased=stream.unreleased and stream.error is not None)
    settlement = Settlement(request_seq, usage, entry.finish, at_us, terms=entry.terms)
    status = entry.status()
    # [DONE] is stored now and sent once this is committed.
    segment, is_whole = entry.unsaved(done=not stream.done)
    answered = bool(entry.turn.answer_ids)
    held_answers = build_messages(*stream.in_ring()) if answered and is_whole else None
    frees_idempotency_key = stream.refused or isinstance(stream.error, Unavailable | InternalError)

    def end(connection: sqlite3.Connection) -> None:
        deleted = stream.cancelled == DELETED
        if segment is not None and not deleted:
            if entry.checkpointed:  # a segment of everything replaces the checkpoints
                events.compact(connection, request_seq, *segment)
            else:
                events.append(connection, request_seq, *segment)
        if frees_idempotency_key:
            events.free_idempotency_key(connection, request_seq)
        if answered:
            # A beginning that the ring has dropped is in the checkpoints.
            texts: Mapping[int, ChoiceMessage] | None = {} if deleted else held_answers
            if texts is None:
                texts = stored_answers(connection, request_seq)
            finished = entry.answer_rows(texts, status)
            tokens = settlement.usage.reported_tokens
            conversations.finish_answers(connection, finished, settlement.settled_at_us, tokens)
        if deleted:
            events.erase(connection, request_seq)

    return SettleUnit(settlement, end)
