"""A batch of units in one transaction: together where they can be, each alone where one raises.

Successive units with the same attribute `run_many`, a function for several at once, are done by it. An
exception of a unit undoes that unit alone; one of the store undoes all. After an exception the other units
are done again: a unit does nothing but to the store.
https://www.sqlite.org/lang_savepoint.html
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any, TypeVar

T = TypeVar("T")
Unit = Callable[[sqlite3.Connection], T]
_STORAGE_FAULTS = (
    sqlite3.SQLITE_FULL,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
    sqlite3.SQLITE_READONLY,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_NOMEM,
    sqlite3.SQLITE_INTERRUPT,
)


class Raised:
    """The exception of a unit of work, as distinct from a return value."""

    __slots__ = ("error",)

    def __init__(self, error: Exception) -> None:
        self.error = error


def probe(connection: sqlite3.Connection) -> None:
    """A unit that writes 64 KiB and removes them: it succeeds when the store can be written again."""
    connection.execute("INSERT INTO migrations (name, applied_at) VALUES ('probe', zeroblob(65536))")
    connection.execute("DELETE FROM migrations WHERE name = 'probe'")


def commit_together(connection: sqlite3.Connection, units: Sequence[Unit[Any]]) -> list[Any]:
    """Do `units` in one transaction; returns what each returned, or a `Raised`.

    Raises sqlite3.Error when the transaction as a whole failed: nothing was done.
    """
    try:
        return _transaction(connection, lambda: _bulk(connection, units))
    except Exception as exc:  # a unit's own, most likely
        if is_storage_fault(exc):
            raise
    # All are undone; again, each in a savepoint now (2 us a unit, which is why not at first).
    return _transaction(connection, lambda: [_in_savepoint(connection, unit) for unit in units])


def _transaction(connection: sqlite3.Connection, work: Callable[[], list[Any]]) -> list[Any]:
    connection.execute("BEGIN IMMEDIATE")
    try:
        outcomes = work()
        connection.execute("COMMIT")
    except BaseException:
        # SQLite has rolled back by itself after some faults (disk full, I/O).
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise
    return outcomes


def _bulk(connection: sqlite3.Connection, units: Sequence[Unit[Any]]) -> list[Any]:
    """Do the units in order, a run of those that share a `run_many` by one call of it."""
    outcomes: list[Any] = []
    for run_many, several in groupby(units, key=lambda unit: getattr(unit, "run_many", None)):
        if run_many is None:
            outcomes += [unit(connection) for unit in several]
        else:
            outcomes += run_many(connection, list(several))
    return outcomes


def _in_savepoint(connection: sqlite3.Connection, unit: Unit[T]) -> T | Raised:
    """Do a unit; if it raises, undo it alone."""
    outcome: T | Raised
    connection.execute("SAVEPOINT unit")
    try:
        outcome = unit(connection)
    except Exception as exc:  # raised where the unit is awaited
        if is_storage_fault(exc) or not connection.in_transaction:
            raise
        connection.execute("ROLLBACK TO unit")
        outcome = Raised(exc)
    connection.execute("RELEASE unit")
    return outcome


def is_storage_fault(exc: Exception) -> bool:
    """True if the store failed, not the unit."""
    code = getattr(exc, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in _STORAGE_FAULTS
