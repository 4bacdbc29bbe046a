"""One SQLite file: a writer that commits many units of work together, readers that cannot write.

A *unit* is a function of the connection; it is done wholly or not at all, awaited or
not. The writer takes every unit that is queued and commits them in one transaction, because
with `synchronous=FULL` the commit costs most (a unit takes some 20 us, a commit an
fsync). A unit that raises is undone alone, by a savepoint.
While `failing`, the journal refuses new requests and writes `probe` every second (app.journal.journal).
https://www.sqlite.org/wal.html, https://www.sqlite.org/lang_savepoint.html
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

import aiosqlite

from app.errors import StorageUnavailable
from app.store.batch import Raised, Unit, commit_together, is_storage_fault
from app.store.opening import (
    BUSY_TIMEOUT_S,
    StoreRefused,
    busy_timeout,
    create_private,
    lock,
    note_models,
    prepare,
    refusal,
)

T = TypeVar("T")

FILE_NAME = "tokenring.db"
MAX_UNITS = 1024
"""Units in one transaction; bounds how long a failed commit takes to do again."""
READERS = 4
LOCK_TIMEOUT_S = 15.0
"""Seconds that units wait for a store that another process has locked."""
_RETRY_S = 0.05
_VACUUM = "VACUUM"
_VACUUM_ROOM = 2.2
"""Times the file's size that a VACUUM takes beside it: once in a temporary file, once in the log."""


class _PendingUnit:
    """A unit that waits for the writer."""

    __slots__ = ("done", "queued_at_s", "unit")

    def __init__(self, unit: Unit[Any], done: asyncio.Future[Any]) -> None:
        self.unit = unit
        self.done = done
        self.queued_at_s = time.monotonic()


class Database:
    """The store of one data directory. Construct, `open()`, use, `aclose()`."""

    def __init__(self, data_dir: Path, *, patience_s: float = LOCK_TIMEOUT_S) -> None:
        self.path = data_dir / FILE_NAME
        self._data_dir = data_dir
        self._patience_s = patience_s
        self._lock: IO[str] | None = None
        self._writer: aiosqlite.Connection | None = None
        self._readers: list[aiosqlite.Connection] = []
        self._idle_readers: asyncio.Queue[aiosqlite.Connection] = asyncio.Queue()
        self._waiting: deque[_PendingUnit] = deque()
        self._queued = asyncio.Event()
        self._batch: list[_PendingUnit] = []
        self._writing: asyncio.Task[None] | None = None
        self._lingering: asyncio.TimerHandle | None = None
        self._flush_at_s = 0.0
        self._vacuuming: asyncio.Task[bool] | None = None
        self._closed = False
        self.failing = False
        """True after a commit that failed or is held up, until the next that succeeds."""
        self.text_deleted = asyncio.Event()
        """Set when text was deleted: the log has it until its next checkpoint (app.store.purge)."""
        self.num_commits = 0
        self.num_units = 0

    def note_models(self, models: Sequence[str]) -> None:
        """Say in the lock which models are loaded: commands beside the server warn of others by it."""
        if self._lock is not None:
            with contextlib.suppress(OSError):  # of a full disk: it is for warnings alone
                note_models(self._lock, models)

    async def open(self) -> None:
        """Open or create the store.

        Raises StoreRefused: the directory cannot be written, another process has it, the file
        is damaged or from a newer version.
        """
        self._lock = lock(self._data_dir)
        create_private(self.path)
        try:
            self._writer = await _connect(self.path)
            await _run(self._writer, lambda c: prepare(c, self.path))
            uri = self.path.absolute().as_uri()
            for _ in range(READERS):
                self._readers.append(await _reader(uri))
        except BaseException as exc:
            await self._close_connections()
            if isinstance(exc, sqlite3.Error):
                raise StoreRefused(refusal(self.path, exc)) from exc
            raise
        for reader in self._readers:
            self._idle_readers.put_nowait(reader)
        self._writing = asyncio.create_task(self._write_loop(), name="store-writer")

    def submit(self, unit: Unit[T], *, linger_s: float = 0.0) -> asyncio.Future[T]:
        """Queue a unit now; the future is done when it is committed.

        With `linger_s` the unit may wait so many seconds, to be committed together with later units, because
        a commit costs as much as several units. `flush` ends the wait. If the caller leaves, the unit is
        written all the same. The future raises StorageUnavailable if the commit failed, or what the unit
        raised.
        """
        if self._writing is None or self._closed:
            raise StorageUnavailable("The store is not open.")
        done: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting.append(_PendingUnit(unit, done))
        if not linger_s:
            self._queued.set()
        else:
            self._flush_in(linger_s)
        return done

    def _flush_in(self, linger_s: float) -> None:
        loop = asyncio.get_running_loop()
        flush_at_s = loop.time() + linger_s
        if self._lingering is not None:
            if self._flush_at_s <= flush_at_s:
                return
            self._lingering.cancel()
        self._lingering, self._flush_at_s = loop.call_at(flush_at_s, self.flush), flush_at_s

    def flush(self) -> None:
        """Let no unit linger that waits now."""
        if self._waiting:
            self._queued.set()

    async def write(self, unit: Unit[T]) -> T:
        """Do a unit and wait for its commit; a cancelled caller leaves it queued."""
        return await self.submit(unit)

    async def read(self, query: Unit[T]) -> T:
        """Run a query on a read-only connection, off the loop, in one snapshot.

        Raises StorageUnavailable when the file cannot be read.
        """
        if self._writing is None or self._closed:
            raise StorageUnavailable("The store is not open.")
        reader = await self._idle_readers.get()
        try:
            if self._closed:  # while this waited
                raise StorageUnavailable("The store is not open.")
            return await _run(reader, lambda c: _in_snapshot(c, query))
        except sqlite3.Error as exc:
            if not is_storage_fault(exc):
                raise
            raise _unavailable(exc) from exc
        finally:
            self._idle_readers.put_nowait(reader)

    async def checkpoint_wal(self) -> bool:
        """Copy the write-ahead log into the file and empty it, between two batches.

        Returns False when some process's reader was in the way for as long as a locked store is
        waited for. Raises StorageUnavailable when the file cannot be written.
        """
        give_up_s = time.monotonic() + self._patience_s
        while not await self._between_batches(empty_wal):
            if time.monotonic() > give_up_s:
                return False
            await asyncio.sleep(_RETRY_S)
        return True

    async def vacuum(self) -> bool:
        """Have SQLite rewrite the file, without the remains in unallocated space (app.store.purge).

        Takes some 6 s a GB, and three times the file's size on its disk meanwhile. Readers are not
        blocked, and the first unit to be queued interrupts it. Returns True if it was completed and the log
        is empty. Raises StorageUnavailable, also where the disk has no room.
        """
        if self._is_vacuuming() or not await self.checkpoint_wal():
            return False
        if shutil.disk_usage(self._data_dir).free < _VACUUM_ROOM * self.path.stat().st_size:
            raise StorageUnavailable("The disk has no room to write the store anew.")
        self._vacuuming = asyncio.create_task(self._between_batches(_vacuumed), name="vacuum")
        return await asyncio.shield(self._vacuuming) and await self.checkpoint_wal()

    def _is_vacuuming(self) -> bool:
        return self._vacuuming is not None and not self._vacuuming.done()

    async def _end_vacuum(self) -> None:
        """Interrupt a VACUUM until it has ended; before its first step an interrupt is lost."""
        while self._is_vacuuming():
            assert self._writer is not None
            assert self._vacuuming is not None
            await self._writer.interrupt()
            await asyncio.wait({self._vacuuming}, timeout=_RETRY_S)

    async def _between_batches(self, work: Unit[T]) -> T:
        """Do with the writer what must have no transaction around it. Raises StorageUnavailable."""
        if self._writer is None or self._closed:
            raise StorageUnavailable("The store is not open.")
        try:
            return await _run(self._writer, work)
        except sqlite3.OperationalError as exc:
            raise _unavailable(exc) from exc

    @property
    def queue_depth(self) -> int:
        """Units that wait for the writer or are being written."""
        return len(self._waiting) + len(self._batch)

    @property
    def writer_lag_s(self) -> float:
        """Seconds that the oldest uncommitted unit has waited; 0 when there is none."""
        oldest = self._batch or self._waiting
        return time.monotonic() - oldest[0].queued_at_s if oldest else 0.0

    async def _write_loop(self) -> None:
        while not self._closed or self._waiting:
            await self._queued.wait()
            self._queued.clear()
            if self._lingering is not None:
                self._lingering.cancel()
                self._lingering = None
            count = min(len(self._waiting), MAX_UNITS)
            self._batch = [self._waiting.popleft() for _ in range(count)]
            if self._waiting:
                self._queued.set()
            if self._batch:
                await self._end_vacuum()
                await self._write_batch()

    async def _write_batch(self) -> None:
        batch = self._batch
        try:
            outcomes, changed = await self._commit([queued.unit for queued in batch])
        except sqlite3.Error as exc:
            self.failing = True
            _fail(batch, _unavailable(exc))
        except Exception as exc:  # noqa: BLE001  # the writer outlives any unit's error
            _fail(batch, exc)
        else:
            if changed:  # a full disk takes a commit of nothing
                self.failing = False
            self.num_commits += 1
            self.num_units += len(batch)
            for queued, outcome in zip(batch, outcomes, strict=True):
                if queued.done.done():
                    continue
                if isinstance(outcome, Raised):
                    _raise_in(queued, outcome.error)
                else:
                    queued.done.set_result(outcome)
        finally:
            self._batch = []

    async def _commit(self, units: Sequence[Unit[Any]]) -> tuple[list[Any], bool]:
        """One transaction; a store that another process has locked is tried again for a while.

        Returns what the units returned, and whether anything was changed.
        """

        def commit(connection: sqlite3.Connection) -> tuple[list[Any], bool]:
            changes_at_start = connection.total_changes
            outcomes = commit_together(connection, units)
            return outcomes, connection.total_changes != changes_at_start

        assert self._writer is not None
        give_up_s = time.monotonic() + self._patience_s
        while True:
            try:
                return await _run(self._writer, commit)
            except sqlite3.OperationalError as exc:
                if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_s:
                    raise
                self.failing = True
                await asyncio.sleep(_RETRY_S)

    async def aclose(self) -> None:
        """Write what is queued, empty the log into the file, close. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        if self._writing is not None:
            self._queued.set()
            await self._writing
            await self._end_vacuum()
            await self._end_reads()
        await self._close_connections()

    async def _end_reads(self) -> None:
        """Interrupt queries until every reader is idle; between two statements an interrupt is lost."""
        for _ in self._readers:
            while True:
                for reader in self._readers:
                    await reader.interrupt()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self._idle_readers.get(), _RETRY_S)
                    break

    async def _close_connections(self) -> None:
        """Close what is open; a start that was given up and `aclose` may call this at once."""
        readers, self._readers = self._readers, []
        writer, self._writer = self._writer, None
        held, self._lock = self._lock, None
        for reader in readers:
            await reader.close()
        if writer is not None:
            # A reader of another process may be in the way; the next start does it then.
            with contextlib.suppress(sqlite3.Error):
                await _run(writer, lambda c: c.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone())
            await writer.close()
        if held is not None:
            held.close()


def empty_wal(connection: sqlite3.Connection) -> bool:
    """Copy the write-ahead log into the file and empty it; False when a reader is in the way now."""
    (timeout_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute("PRAGMA busy_timeout=0")  # units wait meanwhile: better to try again
    try:
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        connection.execute(f"PRAGMA busy_timeout={timeout_ms}")
    return not busy


def _vacuumed(connection: sqlite3.Connection) -> bool:
    """VACUUM; False when it was interrupted."""
    try:
        connection.execute(_VACUUM)
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorcode != sqlite3.SQLITE_INTERRUPT:
            raise
        return False
    return True


def _fail(batch: Sequence[_PendingUnit], error: Exception) -> None:
    for queued in batch:
        if not queued.done.done():
            _raise_in(queued, error)


def _unavailable(exc: sqlite3.Error) -> StorageUnavailable:
    return StorageUnavailable(f"The server cannot store anything now ({exc}); try again.")


def _raise_in(queued: _PendingUnit, error: Exception) -> None:
    queued.done.set_exception(error)
    queued.done.exception()  # retrieved: a unit's outcome need not be awaited


def _in_snapshot(connection: sqlite3.Connection, query: Unit[T]) -> T:
    connection.execute("BEGIN")
    try:
        return query(connection)
    finally:
        if connection.in_transaction:  # some faults end it
            connection.execute("COMMIT")


async def _run(connection: aiosqlite.Connection, query: Unit[T]) -> T:
    """Run `query` in the connection's own thread: one hop for a whole unit, not one a statement."""
    result: T = await connection._execute(query, connection._conn)  # type: ignore[no-untyped-call]  # noqa: SLF001  # pinned; tests/unit/store guards it
    return result


async def _connect(path: Path | str, *, uri: bool = False) -> aiosqlite.Connection:
    connection = aiosqlite.connect(path, uri=uri, isolation_level=None)
    try:
        return await connection
    except BaseException:
        # Told to end, but it has yet to report to a loop that may be closed by then.
        connection._thread.join()  # noqa: SLF001  # as below
        raise


async def _reader(uri: str) -> aiosqlite.Connection:
    reader = await _connect(f"{uri}?mode=ro", uri=True)
    await _run(reader, lambda c: busy_timeout(c, BUSY_TIMEOUT_S))
    return reader
