"""An empty ledger in memory, and requests put through it."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from itertools import count
from typing import Any

from app.core import Usage
from app.store import checkpoints
from app.store.checkpoints import Checkpoint
from app.store.ledger import Price, Reservation, Settlement, reserve, settle
from app.store.schema import MIGRATIONS, migrate

_IDS = count(1)


def empty_store() -> sqlite3.Connection:
    """A store in memory with the schema of today, as its writer opens it."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    connection.execute("PRAGMA foreign_keys = ON")
    migrate(connection, MIGRATIONS)
    return connection


def at(day: str) -> int:
    """A UTC time, as "2026-11-20" or "2026-11-20T12:00", in microseconds."""
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 1_000_000


def reserved(c: sqlite3.Connection, **fields: Any) -> int:
    """Reserve a request of no consequence but for the fields given; returns its seq."""
    known = {
        "request_id": f"chatcmpl-{next(_IDS):028x}",
        "owner": "local",
        "model": "llama",
        "created_at_us": at("2026-11-20"),
        "max_tokens": 100,
        "prompt_tokens": 10,
        "price": Price(500, 50, 1500),
        "stream": b"{}",
    }
    return reserve(c, Reservation(**known | fields), None)


def checkpoint(c: sqlite3.Connection, request_seq: int, usage: Usage) -> None:
    """Note the counts of one request, and that it said something."""
    checkpoints.write(c, [Checkpoint(request_seq, usage, 1, b"x")])


def settled(c: sqlite3.Connection, usage: Usage, **fields: Any) -> int:
    """Reserve and settle a request; returns its seq."""
    seq = reserved(c, **fields)
    assert settle(c, Settlement(seq, usage, "stop", fields.get("created_at_us", at("2026-11-20"))))
    return seq
