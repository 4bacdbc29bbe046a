"""The store's one writer and its readers: what commits, in which order, and what is refused."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.errors import StorageUnavailable
from app.store import database as database_module
from app.store.batch import Unit, commit_together, probe
from app.store.database import FILE_NAME, MAX_UNITS, READERS, Database, empty_wal
from app.store.opening import StoreRefused
from app.store.schema import MIGRATIONS, applied
from tests.support.sse_client import until

ROOT = Path(__file__).parents[3]


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """An open, empty store with a table for its tests, one that is given up soon when locked."""
    database = Database(tmp_path, patience_s=0.3)
    await database.open()
    await database.write(lambda c: c.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, blob)"))
    yield database
    await database.aclose()


def insert(n: int, size: int = 0) -> Unit[int]:
    """A unit that inserts `n` with that many bytes, and returns it."""

    def unit(c: sqlite3.Connection) -> int:
        c.execute("INSERT INTO t VALUES (?, zeroblob(?))", (n, size))
        return n

    return unit


def numbers(c: sqlite3.Connection) -> list[int]:
    """What is in the table, in the order it came."""
    return [n for (n,) in c.execute("SELECT n FROM t ORDER BY rowid")]


def outside(database: Database) -> sqlite3.Connection:
    """A connection of another process, as far as SQLite can tell."""
    return sqlite3.connect(database.path, isolation_level=None, timeout=0)


def files(data_dir: Path) -> set[str]:
    """The names of a directory's files."""
    return {path.name for path in data_dir.iterdir()}


class Held:
    """Keeps the writer in a unit until it is let go, so that what is queued meanwhile is one batch."""

    def __init__(self, database: Database) -> None:
        self._go_on = threading.Event()
        self.done = database.submit(lambda _c: self._go_on.wait(10))

    async def go_on(self) -> None:
        """Let the writer go on."""
        self._go_on.set()
        await self.done


async def held(database: Database) -> Held:
    """A writer that is held, its unit begun."""
    held = Held(database)
    while not database._batch:
        await asyncio.sleep(0)
    return held


# Units


async def test_units_commit_together(database: Database):
    """Units that come while the writer is busy are one transaction, and each has its own result."""
    writer = await held(database)
    before = database.num_commits, database.num_units
    waiting = [database.submit(insert(n)) for n in range(500)]
    assert database.queue_depth == 501
    assert database.writer_lag_s > 0
    await writer.go_on()
    assert await asyncio.gather(*waiting) == list(range(500))
    assert (database.num_commits - before[0], database.num_units - before[1]) == (2, 501)
    assert (database.queue_depth, database.writer_lag_s) == (0, 0.0)


async def test_a_batch_has_a_limit(database: Database):
    """More units than one transaction takes are several transactions, none left behind."""
    writer = await held(database)
    before = database.num_commits
    waiting = [database.submit(insert(n)) for n in range(2 * MAX_UNITS + 1)]
    await writer.go_on()
    await asyncio.gather(*waiting)
    assert database.num_commits - before == 1 + 3


async def test_units_run_in_order(database: Database):
    """Units are done in the order in which they were submitted, over batches."""
    ran: list[int] = []
    waiting = [database.submit(lambda _c, n=n: ran.append(n)) for n in range(3000)]
    await asyncio.gather(*waiting)
    assert ran == list(range(3000))


async def test_a_unit_that_raises_is_undone_alone(database: Database):
    """A unit that raises half way leaves nothing; the others of its transaction stand."""

    def faulty(c: sqlite3.Connection) -> None:
        insert(2)(c)
        raise KeyError("a bug")

    writer = await held(database)
    first, second, third = map(database.submit, (insert(1), faulty, insert(3)))
    await writer.go_on()
    assert (await first, await third) == (1, 3)
    with pytest.raises(KeyError, match="a bug"):
        await second
    assert await database.read(numbers) == [1, 3]
    assert not database.failing


async def test_a_unit_that_breaks_a_constraint_is_undone_alone(database: Database):
    """SQLite's own errors that are the unit's fault are its caller's alone."""
    writer = await held(database)
    first, second, third = map(database.submit, (insert(1), insert(1), insert(3)))
    await writer.go_on()
    await asyncio.gather(first, third)
    with pytest.raises(sqlite3.IntegrityError):
        await second
    assert await database.read(numbers) == [1, 3]
    assert not database.failing


@pytest.mark.parametrize("end", ["COMMIT", "ROLLBACK"])
async def test_a_unit_that_ends_the_transaction_does_not_end_the_writer(database: Database, end: str):
    """A unit that breaks the rules fails, and what is submitted after it is written."""

    def unruly(c: sqlite3.Connection) -> None:
        c.execute(end)
        raise KeyError("a bug")

    with pytest.raises((KeyError, StorageUnavailable)):
        await database.write(unruly)
    assert await database.write(insert(1)) == 1
    assert await database.read(numbers) == [1]
    assert not database.failing


async def test_a_cancelled_caller_leaves_its_unit(database: Database):
    """A unit whose caller was cancelled while it waited is written all the same."""
    writer = await held(database)
    caller = asyncio.create_task(database.write(insert(1)))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    await writer.go_on()
    assert await database.write(insert(2)) == 2
    assert await database.read(numbers) == [1, 2]


async def test_a_committed_unit_is_on_disk(database: Database):
    """When a unit is done, another process sees it."""
    await database.write(insert(7))
    connection = outside(database)
    assert numbers(connection) == [7]
    connection.close()


# Reading


async def test_readers_cannot_write(database: Database):
    """A query that writes is refused by its connection."""
    with pytest.raises(StorageUnavailable, match="readonly"):
        await database.read(insert(1))
    assert await database.read(numbers) == []


async def test_a_read_sees_one_snapshot(database: Database):
    """What is committed during a query is not in it, and is in the next."""
    loop = asyncio.get_running_loop()
    began, written = asyncio.Event(), threading.Event()

    def twice(c: sqlite3.Connection) -> tuple[list[int], list[int]]:
        before = numbers(c)
        loop.call_soon_threadsafe(began.set)
        assert written.wait(10)
        return before, numbers(c)

    reading = asyncio.create_task(database.read(twice))
    await began.wait()
    await database.write(insert(1))
    written.set()
    assert await reading == ([], [])
    assert await database.read(numbers) == [1]


async def test_a_failed_read_leaves_its_reader(database: Database):
    """A query that raises takes no reader with it and keeps no snapshot."""
    for _ in range(READERS + 1):
        with pytest.raises(sqlite3.OperationalError, match="no such table"):
            await database.read(lambda c: c.execute("SELECT * FROM nowhere"))
    await database.write(insert(1))
    assert await database.read(numbers) == [1]


async def test_a_cancelled_read_leaves_its_reader(database: Database):
    """A caller that is cancelled in the middle of its query does not use up a reader."""
    for _ in range(READERS + 1):
        go_on = threading.Event()
        reading = asyncio.create_task(database.read(lambda _c, e=go_on: e.wait(10)))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        go_on.set()
    assert await database.read(numbers) == []


async def test_any_path_can_be_read(tmp_path: Path):
    """Characters that mean something in a URI mean nothing in a data directory's name."""
    database = Database(tmp_path / "100% ready? #1 ä")
    await database.open()
    assert await database.read(lambda c: c.execute("SELECT count(*) FROM requests").fetchone()) == (0,)
    await database.aclose()


# Faults


async def test_a_full_store_fails_and_recovers(database: Database):
    """A commit without room fails for all its units, sets `failing`; the next that succeeds clears it."""
    pages = await database.write(lambda c: c.execute("PRAGMA page_count").fetchone()[0])
    await database.write(lambda c: c.execute(f"PRAGMA max_page_count={pages + 2}").fetchone())
    writer = await held(database)
    small, large = database.submit(insert(1)), database.submit(insert(2, size=100_000))
    await writer.go_on()
    for done in (small, large):
        with pytest.raises(StorageUnavailable, match="full") as refused:
            await done
        assert refused.value.retry_after_s == 10
    assert database.failing
    assert await database.read(numbers) == []
    with pytest.raises(StorageUnavailable):
        await database.write(probe)
    await database.write(lambda c: c.execute("PRAGMA max_page_count=100000").fetchone())
    assert database.failing, "a full disk takes a commit of nothing"
    await database.write(probe)
    assert not database.failing
    assert await database.read(applied) == [m.name for m in MIGRATIONS]
    assert await database.write(insert(2, size=100_000)) == 2


async def test_a_short_lock_is_waited_for(database: Database):
    """While another process writes, units wait; `failing` says so meanwhile."""
    other = outside(database)
    other.execute("BEGIN IMMEDIATE")
    writing = asyncio.create_task(database.write(insert(1)))
    database._patience_s = 10
    while not database.failing:
        await asyncio.sleep(0.001)
    other.execute("ROLLBACK")
    assert await writing == 1
    assert not database.failing
    other.close()


async def test_a_long_lock_is_given_up(database: Database):
    """Past its patience the writer fails what waits, and goes on by itself once the lock is gone."""
    other = outside(database)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(StorageUnavailable, match="locked"):
        await database.write(insert(1))
    assert database.failing
    assert await database.read(numbers) == [], "readers do not mind"
    other.execute("ROLLBACK")
    assert await database.write(insert(2)) == 2
    assert not database.failing
    assert await database.read(numbers) == [2]
    other.close()


async def test_a_reader_elsewhere_holds_up_nobody(database: Database):
    """Another process that reads for long sees its snapshot; writes go on, and the log is emptied after."""
    other = outside(database)
    other.execute("BEGIN")
    assert numbers(other) == []
    for n in range(50):
        await database.write(insert(n, size=10_000))
    assert numbers(other) == []
    assert len(await database.read(numbers)) == 50
    assert not await database.checkpoint_wal()
    other.execute("COMMIT")
    assert len(numbers(other)) == 50
    assert await database.checkpoint_wal()
    assert (database.path.parent / f"{FILE_NAME}-wal").stat().st_size == 0
    other.close()


def test_a_transaction_that_fails_leaves_none_open():
    """After any failure the connection is ready for the next transaction."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, blob)")
    connection.execute(f"PRAGMA max_page_count={2 + 2}").fetchone()
    for _ in range(2):
        with pytest.raises(sqlite3.OperationalError, match="full"):
            commit_together(connection, [insert(1), insert(2, size=100_000)])
        assert not connection.in_transaction
    assert commit_together(connection, [insert(1)]) == [1]
    assert not empty_wal(connection) or not connection.in_transaction
    connection.close()


# VACUUM

ENDLESS = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT count(*) FROM n"


async def test_vacuum_leaves_a_smaller_file_and_an_empty_log(database: Database):
    """What was deleted takes no room; the rest is as it was, and no other file is left."""
    for n in range(20):
        await database.write(insert(n, size=100_000))
    await database.write(lambda c: c.execute("DELETE FROM t WHERE n > 3"))
    await database.checkpoint_wal()
    size, before = database.path.stat().st_size, files(database.path.parent)
    assert await database.vacuum()
    assert database.path.stat().st_size < size / 3
    assert (database.path.parent / f"{FILE_NAME}-wal").stat().st_size == 0
    assert files(database.path.parent) == before
    assert await database.read(numbers) == [0, 1, 2, 3]
    assert await database.write(insert(4)) == 4


async def test_vacuum_gives_way_to_a_unit(database: Database, monkeypatch: pytest.MonkeyPatch):
    """However long it would take; a later one is done."""
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "_VACUUM", ENDLESS)
        vacuuming = asyncio.create_task(database.vacuum())
        await until(database._is_vacuuming)
        assert not await database.vacuum(), "one at a time"
        assert await database.read(numbers) == [], "readers do not mind"
        assert await database.write(insert(1)) == 1
        assert not await vacuuming
    assert not database.failing
    assert await database.vacuum()


async def test_vacuum_ends_with_the_store(database: Database, monkeypatch: pytest.MonkeyPatch):
    """Whoever asked for it has been cancelled before."""
    monkeypatch.setattr(database_module, "_VACUUM", ENDLESS)
    vacuuming = asyncio.create_task(database.vacuum())
    await until(database._is_vacuuming)
    vacuuming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await vacuuming
    await database.aclose()
    with pytest.raises(StorageUnavailable):
        await database.vacuum()


async def test_vacuum_waits_for_room_and_for_readers_elsewhere(
    database: Database, monkeypatch: pytest.MonkeyPatch
):
    """A disk without room for a second file and a log is left alone."""
    await database.write(insert(1))
    with monkeypatch.context() as patch:
        patch.setattr(database_module, "_VACUUM_ROOM", 1e12)
        with pytest.raises(StorageUnavailable, match="no room"):
            await database.vacuum()
    other = outside(database)
    other.execute("BEGIN")
    assert numbers(other) == [1]
    await database.write(insert(2))
    assert not await database.vacuum()
    other.close()
    assert await database.vacuum()


async def test_vacuum_that_fails_says_so(database: Database, monkeypatch: pytest.MonkeyPatch):
    """Units are written all the same."""
    monkeypatch.setattr(database_module, "_VACUUM", "VACUUM nowhere")
    with pytest.raises(StorageUnavailable, match="nowhere"):
        await database.vacuum()
    assert await database.write(insert(1)) == 1


# The end


async def test_closing_writes_what_is_queued(tmp_path: Path):
    """`aclose` commits every unit that was submitted before it, then refuses, and leaves one file."""
    database = Database(tmp_path)
    await database.open()
    await database.write(lambda c: c.execute("CREATE TABLE t (n INTEGER PRIMARY KEY, blob)"))
    waiting = [database.submit(insert(n)) for n in range(MAX_UNITS + 10)]
    await database.aclose()
    assert all(done.done() for done in waiting)
    with pytest.raises(StorageUnavailable):
        database.submit(insert(1))
    with pytest.raises(StorageUnavailable):
        await database.write(insert(1))
    with pytest.raises(StorageUnavailable):
        await database.read(numbers)
    with pytest.raises(StorageUnavailable):
        await database.checkpoint_wal()
    await database.aclose()
    assert files(tmp_path) == {"lock", FILE_NAME}
    connection = sqlite3.connect(tmp_path / FILE_NAME)
    assert len(numbers(connection)) == MAX_UNITS + 10
    connection.close()


async def test_closing_does_not_wait_for_long_queries(database: Database):
    """Queries that run are ended, those that wait for a reader are refused."""
    endless = "WITH RECURSIVE n (i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n) SELECT sum(i) FROM n"
    began = threading.Semaphore(0)

    def query(c: sqlite3.Connection) -> None:
        began.release()
        c.execute(endless).fetchone()

    reading = [asyncio.create_task(database.read(query)) for _ in range(READERS + 2)]
    for _ in range(READERS):
        await asyncio.to_thread(began.acquire)
    async with asyncio.timeout(5):
        await database.aclose()
        ends = await asyncio.gather(*reading, return_exceptions=True)
    assert [type(end) for end in ends] == [StorageUnavailable] * len(reading)


async def test_closing_a_store_never_opened(tmp_path: Path):
    """Closing what was not opened, or whose start was refused, does nothing."""
    never = Database(tmp_path / "a")
    await never.aclose()
    assert not (tmp_path / "a").exists()
    (tmp_path / FILE_NAME).write_bytes(b"not a database, but something else altogether" * 100)
    refused = Database(tmp_path)
    with pytest.raises(StoreRefused):
        await refused.open()
    await refused.aclose()
    with pytest.raises(StorageUnavailable):
        refused.submit(insert(1))


async def test_a_unit_that_lingers_is_committed_with_the_next(database: Database):
    """One commit for both, as soon as somebody waits for the second."""
    before = database.num_commits
    lingering = database.submit(insert(1), linger_s=60)
    await database.write(insert(2))
    assert (await lingering, database.num_commits - before) == (1, 1)


async def test_a_unit_that_lingers_is_committed_when_it_is_needed(database: Database):
    """`hurry` ends the wait, and so does its end; so does closing."""
    hurried = database.submit(insert(1), linger_s=60)
    database.flush()
    assert await hurried == 1
    assert await database.submit(insert(2), linger_s=0.001) == 2
    last = database.submit(insert(3), linger_s=60)
    await database.aclose()
    assert await last == 3


async def test_a_unit_that_waits_ends_the_lingering_of_those_before_it(database: Database):
    """They are committed together, and the timer of the first is over."""
    first = database.submit(insert(1), linger_s=60.0)
    assert database._lingering is not None
    await database.write(insert(2))
    assert (first.done(), database._lingering) == (True, None)


async def test_a_second_unit_that_lingers_waits_no_longer_than_the_first(database: Database):
    """One timer is enough."""
    first = database.submit(insert(1), linger_s=60.0)
    timer = database._lingering
    second = database.submit(insert(2), linger_s=60.0)
    assert database._lingering is timer
    database.flush()
    assert (await first, await second) == (1, 2)


async def test_a_second_unit_that_lingers_less_takes_the_first_with_it(database: Database):
    """It waits for nobody longer than it may."""
    before = database.num_commits
    first = database.submit(insert(1), linger_s=60.0)
    second = database.submit(insert(2), linger_s=0.001)
    assert (await second, await first, database.num_commits - before) == (2, 1, 1)


async def test_a_store_that_is_closed_while_a_read_waits_is_not_read(tmp_path: Path):
    """All its readers were at work."""
    database = Database(tmp_path)
    await database.open()
    go_on = threading.Event()
    reading = [asyncio.create_task(database.read(lambda _c: go_on.wait(10))) for _ in range(READERS)]
    await until(database._idle_readers.empty)
    late = asyncio.create_task(database.read(lambda _c: None))
    await asyncio.sleep(0)
    closing = asyncio.create_task(database.aclose())
    await until(lambda: database._closed)
    go_on.set()
    with pytest.raises(StorageUnavailable):
        await late
    await asyncio.gather(*reading, closing)
