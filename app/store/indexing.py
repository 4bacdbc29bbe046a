"""Full text, written to the index later than to the tables, and many rows at a time.

A request's own transaction only notes which rows are to be indexed (`unindexed`, kept by triggers):
the index touches as many pages for one row as for a hundred. The journal indexes once a second, and a
search does so first, so that it misses nothing. Rows are numbered as in the view `searched`.
"""

from __future__ import annotations

import sqlite3

from app.store.database import Database
from app.store.words import owner_words

LIMIT = 256
"""Rows that one unit indexes; a unit holds the writer, and streams wait for it."""
LIMIT_CHARS = 3 << 20
"""Of tagged words that one unit indexes, for the same reason; one row may be more. It is 1 MiB of English."""
SEARCH_UNITS, TICK_UNITS = 64, 8
"""Units that a search waits for, and the checkpoint after one; the rest, after an upgrade, is found later."""

# Answers in progress have no text yet: they are indexed once, when they have.
_DUE = (
    "SELECT p.rowid, c.owner, m.text FROM unindexed AS p JOIN messages AS m ON m.seq = p.rowid & 0xFFFFFFFF"
    " JOIN conversations AS c ON c.seq = p.rowid >> 32"
    " WHERE m.status <> 'in_progress' UNION ALL"
    " SELECT p.rowid, c.owner, c.title FROM unindexed AS p JOIN conversations AS c ON c.seq = p.rowid >> 32"
    " WHERE p.rowid & 0xFFFFFFFF = 0 LIMIT ?"
)


def index(connection: sqlite3.Connection) -> bool:
    """Index what is due, at most LIMIT rows and some LIMIT_CHARS; returns whether nothing was left out."""
    due, chars = [], 0
    for rowid, owner, text in connection.execute(_DUE, (LIMIT,)):
        words = owner_words(owner, text)
        due.append((rowid, words))
        chars += len(words)
        if chars >= LIMIT_CHARS:
            break
    connection.executemany("INSERT INTO search (rowid, text) VALUES (?, ?)", due)
    connection.executemany("DELETE FROM unindexed WHERE rowid = ?", [(rowid,) for rowid, _ in due])
    return len(due) < LIMIT and chars < LIMIT_CHARS


async def index_all(database: Database, max_units: int = SEARCH_UNITS) -> None:
    """Index what is due, a unit after the other, so many at most. Raises StorageUnavailable."""
    num_units = 0
    while num_units < max_units and await database.read(_is_due):  # without anything due nothing is written
        await database.write(index)
        num_units += 1


def _is_due(connection: sqlite3.Connection) -> bool:
    return connection.execute(_DUE, (1,)).fetchone() is not None
