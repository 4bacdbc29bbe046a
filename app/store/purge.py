"""The purge of deleted conversations: after their time only counts in the ledger are left, no text.

    deleted ──▶ wiped (rows, titles, events, keys) ──▶ out of the index ──▶ out of log and file ──▶ row gone

The row goes last, so that a purge that died is done again from its beginning. SQLite zeroes what
it frees (`secure_delete`), but for copies of rows that it moved (app.store.scrub). The full-text
index keeps deleted words in its old segments until these are merged into one.
https://www.sqlite.org/fts5.html#the_merge_command
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

from structlog.typing import FilteringBoundLogger

from app.errors import Conflict, StorageUnavailable
from app.log import safe_traceback
from app.store.batch import Unit
from app.store.conversation_list import WIPED
from app.store.conversations import no_conversation
from app.store.database import Database
from app.store.events import num_erased
from app.store.scrub import Scrubber
from app.store.words import register

T = TypeVar("T")

PERIOD_S = 3600.0
FOLD_S = 60.0
"""Seconds between two checkpoints of the write-ahead log, at least, for text deleted in other ways."""
PATIENCE_S = 2.0
"""Seconds that `purge_now` waits for readers."""
MESSAGES = 200
"""Messages that one unit wipes; a unit holds the writer, and streams wait for it."""
MERGED_PAGES = 64
"""Pages of the index that one unit merges."""
_DAY_US = 86_400_000_000


class Purge:
    """Purges what was deleted long enough ago: when it starts, and every hour.

    With it goes what is left of answers deleted one by one; the log is folded sooner, for these and
    for what was never to be stored.
    """

    def __init__(self, database: Database, log: FilteringBoundLogger, after_days: int) -> None:
        self._database = database
        self._log = log
        self._after_days = after_days

    async def run(self) -> None:
        """Go on until cancelled; what could not be done is done the next time."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._purge(), name="purge-due")
            tasks.create_task(self._checkpoint_wal(), name="purge-wal-checkpoint")

    async def _checkpoint_wal(self) -> None:
        forgotten = self._database.text_deleted
        while True:
            await forgotten.wait()
            forgotten.clear()
            try:
                folded = await self._database.checkpoint_wal()
            except StorageUnavailable:
                folded = False
            except Exception as exc:  # noqa: BLE001  # as for the purge
                self._log.error("wal_checkpoint_failed", error=safe_traceback(exc))
                folded = False
            if not folded:
                forgotten.set()
            await asyncio.sleep(FOLD_S)

    async def _purge(self) -> None:
        while True:
            try:
                await self.once()
            except StorageUnavailable as exc:
                self._log.warning("purge_postponed", error=exc.code)
            except Exception as exc:  # noqa: BLE001  # the next one must come all the same
                self._log.error("purge_broke", error=safe_traceback(exc))
            await asyncio.sleep(PERIOD_S)

    async def once(self) -> int:
        """Purge what is due now; returns how many conversations. Raises StorageUnavailable."""
        before_us = time.time_ns() // 1000 - self._after_days * _DAY_US
        erased = await self._database.read(num_erased)
        if not erased and not await self._database.read(partial(_due, before_us=before_us)):
            return 0
        seqs = await self._database.write(partial(_claim_due, before_us=before_us))
        for unit in _wiping(seqs):
            while not await self._database.write(unit):
                pass
        if not await self._database.scrub():
            self._log.warning("purge_postponed", error="another process reads the store")
            return 0
        await self._database.write(partial(_drop, seqs=seqs, erased=erased))
        if seqs:
            self._log.info("purged", conversations=len(seqs))
        return len(seqs)


def _due(connection: sqlite3.Connection, before_us: int) -> list[int]:
    """Conversations deleted before then, and those whose purge was begun; none that is being answered."""
    rows = connection.execute(
        "SELECT seq FROM conversations AS c WHERE deleted_at_us < ? AND NOT EXISTS"
        " (SELECT 1 FROM messages WHERE conversation_seq = c.seq AND status = 'in_progress')",
        (before_us,),
    )
    return [seq for (seq,) in rows]


def _claim_due(connection: sqlite3.Connection, before_us: int) -> list[int]:
    return _claimed(connection, _due(connection, before_us))


def _claimed(connection: sqlite3.Connection, seqs: list[int]) -> list[int]:
    """Hide conversations for good, so that none is restored, and nothing added, while they go."""
    rows = [(WIPED, seq) for seq in seqs]
    connection.executemany("UPDATE conversations SET deleted_at_us = ? WHERE seq = ?", rows)
    return seqs


def purge_now(connection: sqlite3.Connection, conversation_ids: Sequence[str]) -> bool:
    """Purge these conversations at once, deleted or not, on a connection that does nothing after it.

    Works beside a running server. Returns False when a reader kept the write-ahead log from
    being emptied: then the next purge, this one again or the server's, does the rest.
    Raises NotFound, and Conflict while one of them is being answered.
    """
    register(connection)
    connection.execute("PRAGMA secure_delete=ON")
    connection.execute("PRAGMA synchronous=FULL")
    seqs = _in_one(connection, partial(_claim, conversation_ids=conversation_ids))
    for unit in _wiping(seqs):
        while not _in_one(connection, unit):
            pass
    with contextlib.closing(Scrubber(_path(connection))) as scrubber:
        if not _scrub(connection, scrubber):
            return False
        _in_one(connection, partial(_drop, seqs=seqs))
    return True  # and the connection ends here: closing the file has given up its locks (Scrubber)


def _path(connection: sqlite3.Connection) -> Path:
    return Path(next(file for _, name, file in connection.execute("PRAGMA database_list") if name == "main"))


def _scrub(connection: sqlite3.Connection, scrubber: Scrubber) -> bool:
    scrubber.begin()
    give_up_s = time.monotonic() + PATIENCE_S
    while not (last := scrubber.piece(connection)):
        if last is None:
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


def _drop(connection: sqlite3.Connection, seqs: Sequence[int], erased: int = 0) -> None:
    if erased and erased == num_erased(connection):  # else there came another, for the next purge
        connection.execute("PRAGMA user_version=0")
    connection.executemany("DELETE FROM conversations WHERE seq = ?", [(seq,) for seq in seqs])
