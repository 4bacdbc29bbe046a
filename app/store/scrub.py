"""Zeroes the bytes of the file that belong to nothing, where SQLite may leave copies of moved rows.

`secure_delete` zeroes a row where it is deleted. But when SQLite spreads the rows of a page over
its neighbours, their old copies stay in the page's unallocated space, and outlive the rows
(`rebuildPage` in btree.c; found by tests/unit/store/test_purge.py). VACUUM would get rid of them
by writing the whole file while nobody else can write. This reads it, a piece at a time, and
writes zeros where the file format says that there is nothing, so a crash in between harms nobody.
https://www.sqlite.org/fileformat2.html#b_tree_pages

No one else touches the file meanwhile: the write-ahead log is empty, so that there is nothing to
fold into it, and the write lock keeps it so.
"""

from __future__ import annotations

import os
import sqlite3
import struct
from pathlib import Path

PIECE_PAGES = 1024
"""Pages looked at in one go; units wait meanwhile (a few milliseconds)."""
MAX_PAGES = 1 << 24
"""Up to here (64 GiB) a first byte of 2, 5, 10 or 13 is a b-tree page's: elsewhere it is that of a
page number, or zero."""
_HEADER = struct.Struct(">xxxHH")
_HEADER_SIZE = {2: 12, 5: 12, 10: 8, 13: 8}


def fold(connection: sqlite3.Connection) -> bool:
    """Fold the write-ahead log into the file and empty it; False when a reader is in the way now."""
    (timeout_ms,) = connection.execute("PRAGMA busy_timeout").fetchone()
    connection.execute("PRAGMA busy_timeout=0")  # units wait meanwhile: better to try again
    try:
        busy, _, _ = connection.execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchone()
    finally:
        connection.execute(f"PRAGMA busy_timeout={timeout_ms}")
    return not busy


class Scrubber:
    """The raw file of a store.

    Close it after all of the process's connections: to close any descriptor of a file gives up
    all of the process's locks on it. https://www.sqlite.org/howtocorrupt.html#_posix_advisory_locks
    """

    def __init__(self, path: Path) -> None:
        self._log = path.with_name(path.name + "-wal")
        self._file = os.open(path, os.O_RDWR)
        self._next = 0

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def begin(self) -> None:
        """Start anew at the first page."""
        self._next = 1  # the page before it holds the schema, and a header of its own

    def piece(self, connection: sqlite3.Connection) -> bool | None:
        """Scrub the next pages; returns whether those were the last, None when a reader is in the way.

        Not within a transaction. Other connections may hold old copies of pages: theirs come
        back to the file when they write them.
        """
        if not (fold(connection) and _locked(connection)):
            return None
        try:
            if self._log.exists() and self._log.stat().st_size:  # written since it was folded
                return None
            (page_size,) = connection.execute("PRAGMA page_size").fetchone()
            num_pages: int = connection.execute("PRAGMA page_count").fetchone()[0]
            if num_pages > MAX_PAGES:
                return True
            self._scrub(page_size, min(PIECE_PAGES, num_pages - self._next))
        finally:
            connection.execute("COMMIT")
        connection.execute("PRAGMA shrink_memory")  # its own copies of pages are as they were
        return self._next >= num_pages

    def _scrub(self, page_size: int, num_pages: int) -> None:
        start = self._next * page_size
        piece = os.pread(self._file, max(0, num_pages) * page_size, start)
        written = False
        for offset in range(0, len(piece), page_size):
            first, end = unallocated(piece, offset, page_size)
            if first < end and any(piece[offset + first : offset + end]):
                os.pwrite(self._file, bytes(end - first), start + offset + first)
                written = True
        if written:
            os.fsync(self._file)
        self._next += num_pages


def _locked(connection: sqlite3.Connection) -> bool:
    """Begin a transaction that keeps all other writers out, unless one is at work now."""
    try:
        connection.execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as exc:
        if exc.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
            raise
        return False
    return True


def unallocated(piece: bytes, offset: int, page_size: int) -> tuple[int, int]:
    """The unused range of the page at `offset` of `piece`; empty for pages that are not of a b-tree."""
    header_size = _HEADER_SIZE.get(piece[offset])
    if header_size is None:
        return 0, 0
    num_cells, content = _HEADER.unpack_from(piece, offset)
    first = header_size + 2 * num_cells
    content = content or 65536
    return (first, content) if first <= content <= page_size else (0, 0)
