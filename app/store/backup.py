"""A store opened by a command, beside the server that may be serving from it; and its online backup.

SQLite's own locks keep the two apart: a reader sees one snapshot and blocks no writer, a
writer waits for the lock. https://www.sqlite.org/wal.html, https://www.sqlite.org/backup.html
"""

from __future__ import annotations

import os
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from app.store.database import FILE_NAME, LOCK_TIMEOUT_S
from app.store.opening import (
    StoreRefused,
    check_version,
    create_private,
    holder,
    keep_temporary_files_in,
    lock,
    prepare,
    refusal,
)
from app.store.schema import MIGRATIONS, applied

_PAGES_A_STEP = 1000
SERVED_TIMEOUT_S = 120.0
"""Seconds that a command waits to write beside a server, whose VACUUM holds the lock for some 6 s a GB."""
_VACUUMING = (
    "{} is still locked after {:.0f} s ({}), most likely because the server that uses it writes the file anew"
    " (VACUUM, some 6 s a GB). Leave the server running, and run the command again later."
)


@contextmanager
def connected(data_dir: Path, *, write: bool = False, older: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection to the store of a data directory, in autocommit mode.

    `older` allows a schema that the server would first bring up to date. Raises StoreRefused:
    there is no store, it is of another version, damaged, or locked for too long: 15 s, and where a
    server holds the directory and `write` is asked for 120 s.
    """
    path = data_dir / FILE_NAME
    _check_there(path)
    served = write and holder(data_dir) is not None
    timeout_s = SERVED_TIMEOUT_S if served else LOCK_TIMEOUT_S
    try:
        with closing(_connect(path, "rw" if write else "ro", timeout_s)) as connection:
            connection.execute("PRAGMA foreign_keys=ON")
            connection.execute("PRAGMA secure_delete=ON")
            if write:
                keep_temporary_files_in(connection, data_dir)
            names = applied(connection)
            check_version(names, path)
            if MIGRATIONS[-1].name not in names and not older:
                raise StoreRefused(
                    "The store is from an older version; start the server once, which updates it."
                )
            yield connection
    except sqlite3.Error as exc:
        if served and getattr(exc, "sqlite_errorcode", 0) & 0xFF == sqlite3.SQLITE_BUSY:
            raise StoreRefused(_VACUUMING.format(path, timeout_s, exc)) from exc
        raise StoreRefused(refusal(path, exc)) from exc


@contextmanager
def transaction(data_dir: Path, *, write: bool = False, older: bool = False) -> Iterator[sqlite3.Connection]:
    """A connection within one transaction: committed at the end, rolled back by an exception."""
    with connected(data_dir, write=write, older=older) as connection:
        connection.execute("BEGIN IMMEDIATE" if write else "BEGIN")
        yield connection
        connection.execute("COMMIT")


def make_missing(data_dir: Path) -> None:
    """Make the store where there is none, as the server does when it first starts. Raises StoreRefused."""
    path = data_dir / FILE_NAME
    if path.exists():
        return
    try:
        with lock(data_dir):
            create_private(path)
            with closing(sqlite3.connect(path, isolation_level=None)) as connection:
                prepare(connection, path)
    except sqlite3.Error as exc:
        raise StoreRefused(refusal(path, exc)) from exc


def conversations(connection: sqlite3.Connection) -> list[tuple[str, str]]:
    """Id and owner of every conversation that is not deleted, oldest first."""
    return connection.execute(
        "SELECT id, owner FROM conversations WHERE deleted_at_us IS NULL ORDER BY seq"
    ).fetchall()


def backup(source: sqlite3.Connection, target: Path) -> int:
    """Copy the snapshot of `source`'s transaction to a new file; returns its size in bytes.

    The file appears under its name when it is whole and checked. Raises StoreRefused when it is
    there already, or cannot be written.
    """
    _check_absent(target)
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    except OSError as exc:
        raise StoreRefused(f"{target} cannot be written: {exc.strerror}.") from exc
    os.close(descriptor)
    partial = Path(name)
    try:
        _copy(source, partial)
        _check_absent(target)
        partial.rename(target)
        _sync(target.parent)
    except (OSError, sqlite3.Error) as exc:
        raise StoreRefused(f"{target} cannot be written: {exc}.") from exc
    finally:
        for left in (
            partial,
            *(partial.with_name(partial.name + end) for end in ("-journal", "-wal", "-shm")),
        ):
            with suppress(OSError):
                left.unlink()
    return target.stat().st_size


def _check_there(path: Path) -> None:
    try:
        there = path.is_file()
    except OSError as exc:
        raise StoreRefused(f"--data-dir {path.parent} cannot be read: {exc.strerror}.") from exc
    if not there:
        raise StoreRefused(
            f"--data-dir {path.parent.absolute()} has no store ({FILE_NAME}). Name the server's data"
            " directory with --data-dir; its first start makes the store."
        )


def _connect(path: Path, mode: str, timeout_s: float) -> sqlite3.Connection:
    uri = f"{path.absolute().as_uri()}?mode={mode}"
    return sqlite3.connect(uri, uri=True, isolation_level=None, timeout=timeout_s)


def _check_absent(target: Path) -> None:
    if target.exists():
        raise StoreRefused(f"{target} exists already and is not overwritten; choose another name.")


def _copy(source: sqlite3.Connection, partial: Path) -> None:
    """Copy the database. The open transaction keeps the snapshot, so no commit restarts the copy."""
    assert source.in_transaction
    with closing(sqlite3.connect(partial, isolation_level=None)) as copy:
        source.backup(copy, pages=_PAGES_A_STEP, sleep=0)
        problem = copy.execute("PRAGMA quick_check(1)").fetchone()[0]
    if problem != "ok":
        raise StoreRefused(f"The store is damaged ({problem}); no backup was written.")


def _sync(directory: Path) -> None:
    """Make the new name durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
