"""Applies numbered migrations to a database file. Those of this version are in app.store.schema."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Sequence
from typing import NamedTuple

from app.store.words import register


class Migration(NamedTuple):
    """One step of the schema."""

    name: str
    apply: Callable[[sqlite3.Connection], None]


def statements(script: str) -> list[str]:
    """The statements of a script; `executescript` would commit the transaction around it."""
    statements, pending = [], ""
    for line in script.splitlines(keepends=True):
        pending += line
        if sqlite3.complete_statement(pending):
            statements.append(pending)
            pending = ""
    return statements


def applied(connection: sqlite3.Connection) -> list[str]:
    """The migrations that the file has had, in order; none for an empty file."""
    table = connection.execute("SELECT 1 FROM sqlite_schema WHERE name = 'migrations'").fetchone()
    if table is None:
        return []
    return [name for (name,) in connection.execute("SELECT name FROM migrations ORDER BY rowid")]


def migrate(connection: sqlite3.Connection, migrations: Sequence[Migration]) -> None:
    """Apply what is missing, each migration in a transaction of its own with its name.

    The connection can write to the index's tables afterwards (app.store.words).
    """
    register(connection)
    connection.execute(
        "CREATE TABLE IF NOT EXISTS migrations (name TEXT PRIMARY KEY, applied_at TEXT NOT NULL)"
    )
    done = set(applied(connection))
    for migration in migrations:
        if migration.name in done:
            continue
        connection.execute("BEGIN IMMEDIATE")
        try:
            migration.apply(connection)
            connection.execute("INSERT INTO migrations VALUES (?, datetime('now'))", (migration.name,))
            connection.execute("COMMIT")
        except BaseException:
            if connection.in_transaction:  # some faults end it
                connection.execute("ROLLBACK")
            raise
