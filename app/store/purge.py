"""The purge of deleted conversations: after their time only counts in the ledger are left, no text.

    deleted ──▶ wiped (rows, titles, events, keys, index) ──▶ out of the log ──▶ out of the file ──▶ row gone

SQLite zeroes what it frees (`secure_delete`), and the log is emptied after each purge. When SQLite spreads
the rows of a page over its neighbours, copies of them stay in the page's unallocated space, and outlive the
rows (`rebuildPage` in btree.c; found by tests/unit/store/test_purge.py). VACUUM writes the file without
them: in the first idle minute after a purge, at most once a day, or sooner for what a command purged beside
the server. The row of a conversation is deleted last, so that a purge that died is done again from its
beginning. The full-text index keeps deleted words in its old segments until these are merged into one.
https://www.sqlite.org/fts5.html#the_merge_command
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

from structlog.typing import FilteringBoundLogger

from app.errors import Conflict, StorageUnavailable
from app.log import safe_traceback
from app.store.batch import Unit
from app.store.conversation_list import WIPED
from app.store.conversations import no_conversation
from app.store.database import Database, empty_wal
from app.store.events import num_erased
from app.store.words import register

T = TypeVar("T")

PERIOD_S = 3600.0
CHECKPOINT_S = 60.0
"""Seconds between two checkpoints of the write-ahead log, at least, for text deleted in other ways."""
IDLE_S = 60.0
"""Seconds without a write after which the file may be rewritten."""
RETRY_S = 600.0
"""Seconds after a VACUUM that gave way to a write until the next is tried."""
VACUUM_PERIOD_S = 86_400.0
"""Seconds between two VACUUMs, at least, except for what a command purged beside the server."""
OVERDUE_S = 7 * 86_400.0
"""Seconds after which the log warns, once a day, that no idle minute was long enough for VACUUM."""
READER_TIMEOUT_S = 2.0
"""Seconds that `purge_now` waits for readers."""
MESSAGES = 200
"""Messages that one unit wipes; a unit holds the writer, and streams wait for it."""
MERGED_PAGES = 64
"""Pages of the index that one unit merges."""
_DAY_US = 86_400_000_000


class Purge:
    """Purges what was deleted long enough ago: when it starts, and every hour.

    It also purges the remains of answers deleted one by one; the log is emptied sooner, for these and
    for what was never to be stored.
    """

    def __init__(self, database: Database, log: FilteringBoundLogger, after_days: int) -> None:
        self._database = database
        self._log = log
        self._after_days = after_days
        self._wiped: list[int] = []
        """Conversations of which the file may have copies in unallocated space."""
        self._erased = 0
        """Answers, as `num_erased` counts them, of which it may."""
        self._overdue_at_s = 0.0
        self._purging = asyncio.Lock()
        self._vacuum_at_s = 0.0
        """Monotonic time before which there is no VACUUM."""

    async def run(self) -> None:
        """Purge until cancelled; what could not be done is done the next time."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._purge(), name="purge-due")
            tasks.create_task(self._checkpoint_wal(), name="purge-wal-checkpoint")
            tasks.create_task(self._vacuum(), name="purge-vacuum")

    async def _checkpoint_wal(self) -> None:
        forgotten = self._database.text_deleted
        while True:
            await forgotten.wait()
            forgotten.clear()
            if not await self._tried(self._database.checkpoint_wal, broke="wal_checkpoint_failed"):
                forgotten.set()
            await asyncio.sleep(CHECKPOINT_S)

    async def _purge(self) -> None:
        while True:
            await self._tried(self.once, postponed="purge_postponed")
            await asyncio.sleep(PERIOD_S)

    async def _vacuum(self) -> None:
        units_before = -1
        while True:
            await asyncio.sleep(IDLE_S)
            units = self._database.num_units
            idle, units_before = units == units_before, units
            if idle and await self._tried(self._is_purged_elsewhere):
                await self._tried(self.once, postponed="purge_postponed")
                if await self._tried(self._is_purged_elsewhere):  # a reader or the disk was in the way
                    await asyncio.sleep(RETRY_S)
                    continue
            if not (self._wiped or self._erased):
                continue
            if time.monotonic() > self._overdue_at_s:
                self._log.warning("vacuum_overdue", hint="purged text may be in the file: docs/storage.md")
                self._overdue_at_s = time.monotonic() + VACUUM_PERIOD_S
            if idle and time.monotonic() >= self._vacuum_at_s:
                done = await self._tried(self.compact, postponed="vacuum_postponed")
                self._vacuum_at_s = time.monotonic() + (VACUUM_PERIOD_S if done else RETRY_S)

    async def _is_purged_elsewhere(self) -> bool:
        """True if a command wiped conversations of which this process does not know; their VACUUM is due."""
        wiped = await self._database.read(partial(deleted_before, before_us=WIPED + 1))
        return bool(set(wiped) - set(self._wiped))

    async def _tried(
        self, work: Callable[[], Awaitable[int]], *, postponed: str | None = None, broke: str = "purge_broke"
    ) -> int:
        """Do a step; 0 where it failed: the log says so, and it is tried again at its next time."""
        try:
            return await work()
        except StorageUnavailable as exc:
            if postponed is not None:
                self._log.warning(postponed, error=exc.code, reason=exc.message)
        except Exception as exc:  # noqa: BLE001  # the next one must be tried all the same
            self._log.error(broke, error=safe_traceback(exc))
        return 0

    async def once(self) -> int:
        """Purge what is due now; returns how many conversations. Raises StorageUnavailable."""
        async with self._purging:
            return await self._purge_due()

    async def _purge_due(self) -> int:
        before_us = time.time_ns() // 1000 - self._after_days * _DAY_US
        erased = await self._database.read(num_erased)
        due = await self._database.read(partial(deleted_before, before_us=before_us))
        if erased == self._erased and not set(due) - set(self._wiped):
            return 0
        if await self._is_purged_elsewhere():
            self._vacuum_at_s = 0.0
        seqs = await self._database.write(partial(_claim_due, before_us=before_us))
        for unit in _wiping(seqs):
            while not await self._database.write(unit):
                pass
        if not await self._database.checkpoint_wal():
            self._log.warning("purge_postponed", error="another process reads the store")
            return 0
        if not (self._wiped or self._erased):
            self._overdue_at_s = time.monotonic() + OVERDUE_S
        num_purged = len(set(seqs) - set(self._wiped))
        self._wiped, self._erased = seqs, erased
        if num_purged:
            self._log.info("purged", conversations=num_purged)
        return num_purged

    async def compact(self) -> bool:
        """Have the file rewritten, and delete the rows of purged conversations.

        Returns True if the file was written; any other write interrupts it. Raises StorageUnavailable.
        """
        seqs, erased = self._wiped, self._erased
        if not await self._database.vacuum():
            return False
        await self._database.write(partial(_drop, seqs=seqs, erased=erased))
        self._wiped, self._erased = [], 0
        return True


def deleted_before(connection: sqlite3.Connection, before_us: int, column: str = "seq") -> list[Any]:
    """Conversations deleted before then, and those whose purge was begun; none that is being answered."""
    rows = connection.execute(
        f"SELECT {column} FROM conversations AS c WHERE deleted_at_us < ? AND NOT EXISTS"  # noqa: S608  # a column's name
        " (SELECT 1 FROM messages WHERE conversation_seq = c.seq AND status = 'in_progress') ORDER BY seq",
        (before_us,),
    )
    return [value for (value,) in rows]


def _claim_due(connection: sqlite3.Connection, before_us: int) -> list[int]:
    return _claimed(connection, deleted_before(connection, before_us))


def _claimed(connection: sqlite3.Connection, seqs: list[int]) -> list[int]:
    """Hide conversations permanently, so that none is restored or extended while they are wiped."""
    rows = [(WIPED, seq) for seq in seqs]
    connection.executemany("UPDATE conversations SET deleted_at_us = ? WHERE seq = ?", rows)
    return seqs


def purge_now(connection: sqlite3.Connection, conversation_ids: Sequence[str], *, vacuum: bool) -> bool:
    """Purge these conversations at once, deleted or not, and the remains of erased answers.

    Works beside a running server, to which the file's VACUUM is then left: no write can be done meanwhile.
    Returns False when another process kept the write-ahead log from being emptied: then the next purge,
    this one again or the server's, does the rest. Raises NotFound, and Conflict while one of them is being
    answered.
    """
    register(connection)
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA synchronous=FULL")
    erased = num_erased(connection)
    if not (conversation_ids or erased):
        return True
    seqs = _in_one(connection, partial(_claim, conversation_ids=conversation_ids))
    for unit in _wiping(seqs):
        while not _in_one(connection, unit):
            pass
    if not _emptied(connection):
        return False
    if vacuum:
        connection.execute("VACUUM")
        if not _emptied(connection):
            return False
        _in_one(connection, partial(_drop, seqs=seqs, erased=erased))
    return True


def _emptied(connection: sqlite3.Connection) -> bool:
    give_up_s = time.monotonic() + READER_TIMEOUT_S
    while not empty_wal(connection):
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.05)
    return True


def _in_one(connection: sqlite3.Connection, unit: Unit[T]) -> T:
    with connection:
        connection.execute("BEGIN IMMEDIATE")
        return unit(connection)


def _claim(connection: sqlite3.Connection, conversation_ids: Sequence[str]) -> list[int]:
    seqs = []
    for conversation_id in conversation_ids:
        row = connection.execute(
            "SELECT seq, EXISTS (SELECT 1 FROM messages WHERE conversation_seq = c.seq"
            " AND status = 'in_progress') FROM conversations AS c WHERE id = ?",
            (conversation_id,),
        ).fetchone()
        if row is None:
            raise no_conversation(conversation_id)
        seq, answering = row
        if answering:
            raise Conflict(
                f"Conversation {conversation_id} is being answered; stop it first.", code="conversation_busy"
            )
        seqs.append(seq)
    return _claimed(connection, seqs)


def _wiping(seqs: Sequence[int]) -> Iterator[Unit[bool]]:
    """Units in order; each is repeated until it says that there is nothing left to do."""
    for seq in seqs:
        yield partial(_wipe, seq=seq)
    yield partial(_merge, pages=-MERGED_PAGES)
    yield partial(_merge, pages=MERGED_PAGES)


def _wipe(connection: sqlite3.Connection, seq: int) -> bool:
    """Delete the newest messages: a parent's deletion would cascade, and SQLite bounds how deep."""
    rows = connection.execute(
        "SELECT seq, request_seq FROM messages WHERE conversation_seq = ? ORDER BY seq DESC LIMIT ?",
        (seq, MESSAGES),
    ).fetchall()
    requests = [(request_seq,) for _, request_seq in rows if request_seq is not None]
    connection.executemany("DELETE FROM events WHERE request_seq = ?", requests)
    connection.executemany("DELETE FROM suspended WHERE request_seq = ?", requests)
    connection.executemany(
        "UPDATE requests SET stream = x'', idempotency_key = NULL, fingerprint = NULL WHERE seq = ?", requests
    )
    connection.executemany("DELETE FROM messages WHERE seq = ?", [(message_seq,) for message_seq, _ in rows])
    connection.execute("UPDATE conversations SET title = '' WHERE seq = ?", (seq,))
    return len(rows) < MESSAGES


def _merge(connection: sqlite3.Connection, pages: int) -> bool:
    """Merge some pages of the index; a negative number first says that all segments become one."""
    changes_at_start = connection.total_changes
    connection.execute("INSERT INTO search (search, rank) VALUES ('merge', ?)", (pages,))
    return pages < 0 or connection.total_changes - changes_at_start < 2


def _drop(connection: sqlite3.Connection, seqs: Sequence[int], erased: int) -> None:
    if erased and erased == num_erased(connection):  # else one was added, for the next purge
        connection.execute("PRAGMA user_version=0")
    connection.executemany("DELETE FROM conversations WHERE seq = ?", [(seq,) for seq in seqs])
