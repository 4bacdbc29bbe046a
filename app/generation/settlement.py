"""The units that write an entry's end: its settlement, or its suspension.

What they write is read when they are made, on the loop.
"""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Mapping
from typing import Any

from app.errors import Conflict, InternalError, Unavailable
from app.generation.journal_entry import JournalEntry
from app.generation.open_requests import stored_answers
from app.generation.suspended import pack
from app.store import checkpoints, conversations, events, suspensions
from app.store.batch import Unit
from app.store.checkpoints import Checkpoint
from app.store.ledger import Settlement, Settling
from app.stream.token_stream import DELETED
from app.stream.transcript import ChoiceMessage, answers


def settlement_of(entry: JournalEntry) -> Unit[int]:
    """The unit that settles an entry.

    It returns the completion tokens that the row has then.
    """
    stream, request_seq = entry.stream, entry.request_seq
    assert request_seq is not None
    at_us = time.time_ns() // 1000
    settlement = Settlement(request_seq, entry.usage(), entry.finish, at_us, terms=entry.terms)
    status = entry.status()
    done = not stream.done  # the last event is sent once this is committed
    news = stream.dump(0, done=done)
    whole = news is not None and news[0] == 1
    if not whole:
        news = stream.dump(entry.saved_id, done=done)
    held_answers = answers(*stream.held()) if whole else None
    send_again = stream.refused or isinstance(stream.error, Unavailable | InternalError)

    def end(connection: sqlite3.Connection) -> None:
        deleted = stream.cancelled == DELETED
        if news is not None and not deleted:
            if entry.checkpointed:  # a segment of everything takes the place of the checkpoints
                events.compact(connection, request_seq, *news)
            else:
                events.append(connection, request_seq, *news)
        if send_again:
            events.free_key(connection, request_seq)
        if entry.turn is not None:
            # Where the ring has lost its beginning, the checkpoints have it.
            heard: Mapping[int, ChoiceMessage] | None = {} if deleted else held_answers
            if heard is None:
                heard = stored_answers(connection, request_seq)
            tokens = settlement.usage.reported_tokens
            finished = entry.finished(heard, status)
            conversations.finish_answers(connection, finished, settlement.settled_at_us, tokens)
        if deleted:
            events.erase(connection, request_seq)

    return Settling(settlement, end)


def suspension_of(entry: JournalEntry, safety: Mapping[str, Any]) -> Unit[None]:
    """The unit that suspends an entry: its events and counts, and what it takes to go on.

    Raises TypeError, OverflowError for what cannot be stored; the unit raises Conflict where it has ended.
    """
    stream, request_seq = entry.stream, entry.request_seq
    assert request_seq is not None
    suspension = pack(request_seq, entry.key_id, entry.loaded, entry.progress(), safety)
    usage, news = entry.usage(), stream.dump(0)
    whole = news is not None and news[0] == 1
    if not whole:
        news = stream.dump(entry.saved_id)

    def suspend(connection: sqlite3.Connection) -> None:
        if not suspensions.add(connection, suspension):
            raise Conflict("The request was deleted, or has ended.")
        if news is not None and whole:
            events.forget_segments(connection, request_seq)
        checkpoints.write(connection, [Checkpoint(request_seq, usage, *(news or (0, b"")))])

    return suspend
