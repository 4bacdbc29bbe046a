"""Bytes that belong to nothing are zeroed, and nothing else is touched, nor while anyone is in the way."""

from __future__ import annotations

import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from app.store import scrub
from app.store.scrub import Scrubber, fold, unallocated

PAGE = 512
SECRET = b"a secret that no row has any more"


def page(kind: int, num_cells: int, content: int) -> bytes:
    """The beginning of a page, filled up with ones."""
    return (bytes([kind]) + b"\0\0" + struct.pack(">HH", num_cells, content)).ljust(PAGE, b"\1")


@pytest.mark.parametrize(
    ("raw", "unused"),
    [
        (page(13, 3, 100), (8 + 6, 100)),  # a table's leaf
        (page(5, 3, 100), (12 + 6, 100)),  # a table's inner page has a pointer more
        (page(10, 0, 512), (8, 512)),  # an index's empty leaf
        (page(2, 1, 14), (14, 14)),  # full to the last byte
        (page(7, 3, 100), (0, 0)),  # no page of a b-tree
        (page(13, 3, 10), (0, 0)),  # content within the header: not to be believed
        (page(13, 3, 513), (0, 0)),  # content beyond the page
        (page(13, 3, 0), (0, 0)),  # 0 stands for 65536, which no page of this size has
    ],
)
def test_unused_range_of_a_page_is_between_its_pointers_and_its_content(raw: bytes, unused: tuple[int, int]):
    """https://www.sqlite.org/fileformat2.html#b_tree_pages."""
    assert unallocated(b"x" * 10 + raw, 10, PAGE) == unused


def test_page_of_64_kibibytes_may_be_empty():
    """Its content then begins at 65536, written as 0."""
    raw = page(13, 0, 0).ljust(65536, b"\1")
    assert unallocated(raw, 0, 65536) == (8, 65536)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A store with a table whose page has a copy of a row that is no row any more."""
    path = tmp_path / "store.db"
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE t (text)")
        connection.execute("INSERT INTO t VALUES ('a row')")
    raw = bytearray(path.read_bytes())
    size = struct.unpack_from(">H", raw, 16)[0]
    first, end = unallocated(raw, size, size)
    assert end - first > len(SECRET) + 50
    raw[size + first + 50 : size + first + 50 + len(SECRET)] = SECRET
    path.write_bytes(raw)
    return path


@pytest.fixture
def store(path: Path) -> Iterator[tuple[sqlite3.Connection, Scrubber]]:
    """A connection to it, and what scrubs it."""
    connection = sqlite3.connect(path, isolation_level=None, timeout=0)
    scrubber = Scrubber(path)
    scrubber.begin()
    yield connection, scrubber
    connection.close()
    scrubber.close()


def test_copies_of_rows_are_zeroed_and_rows_stay(store: tuple[sqlite3.Connection, Scrubber], path: Path):
    """The store is as sound as it was."""
    connection, scrubber = store
    assert SECRET in path.read_bytes()
    assert scrubber.piece(connection) is True
    assert SECRET not in path.read_bytes()
    assert connection.execute("SELECT text FROM t").fetchall() == [("a row",)]
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)


def test_writer_at_work_is_not_disturbed(store: tuple[sqlite3.Connection, Scrubber], path: Path):
    """It is tried again later; the connection is left without a transaction."""
    connection, scrubber = store
    with closing(sqlite3.connect(path, isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        assert scrubber.piece(connection) is None
        other.execute("COMMIT")
    assert not connection.in_transaction
    assert scrubber.piece(connection) is True


def test_store_that_cannot_be_locked_for_another_reason_says_so(
    store: tuple[sqlite3.Connection, Scrubber],
):
    """It is not taken for a writer at work."""
    connection, scrubber = store
    connection.execute("PRAGMA query_only=1")
    with pytest.raises(sqlite3.OperationalError):
        scrubber.piece(connection)


def test_what_was_written_since_the_log_was_folded_is_not_scrubbed_over(
    store: tuple[sqlite3.Connection, Scrubber], path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The log is not empty: what is in the file may be older."""
    connection, scrubber = store
    with closing(sqlite3.connect(path, isolation_level=None)) as other:

        def written_after(folded: sqlite3.Connection) -> bool:
            done = fold(folded)
            other.execute("INSERT INTO t VALUES ('another')")
            return done

        monkeypatch.setattr(scrub, "fold", written_after)
        assert scrubber.piece(connection) is None
        assert SECRET in path.read_bytes()
    assert not connection.in_transaction


def test_store_beyond_what_can_be_told_apart_is_left_as_it_is(
    store: tuple[sqlite3.Connection, Scrubber], path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A first byte may be that of a page's number there."""
    connection, scrubber = store
    monkeypatch.setattr(scrub, "MAX_PAGES", 1)
    assert scrubber.piece(connection) is True
    assert SECRET in path.read_bytes()


def test_store_is_scrubbed_a_piece_at_a_time(
    store: tuple[sqlite3.Connection, Scrubber], monkeypatch: pytest.MonkeyPatch
):
    """Units wait no longer than for one."""
    connection, scrubber = store
    monkeypatch.setattr(scrub, "PIECE_PAGES", 1)
    connection.execute("CREATE TABLE u (text)")
    connection.execute("CREATE TABLE v (text)")
    assert [scrubber.piece(connection) for _ in range(3)] == [False, False, True]


def test_log_is_not_folded_while_a_reader_is_in_the_way(
    store: tuple[sqlite3.Connection, Scrubber], path: Path
):
    """The time that the connection waits for locks is as before."""
    connection, _ = store
    connection.execute("PRAGMA busy_timeout=1234")
    with closing(sqlite3.connect(path, isolation_level=None)) as reader:
        reader.execute("BEGIN")
        reader.execute("SELECT * FROM t").fetchall()
        connection.execute("INSERT INTO t VALUES ('another')")
        assert not fold(connection)
        reader.execute("COMMIT")
        assert fold(connection)
    assert connection.execute("PRAGMA busy_timeout").fetchone() == (1234,)
    assert path.with_name("store.db-wal").stat().st_size == 0
