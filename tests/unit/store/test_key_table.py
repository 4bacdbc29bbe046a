"""The keys in memory: found by their secret, and seen to change within a second."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import structlog

from app.core import KeyTerms
from app.store import key_table, keys
from app.store.database import FILE_NAME, Database
from app.store.key_table import KeyTable
from app.store.keys import NewKey, digest_of
from tests.support.sse_client import until

NOW_US = 1_790_000_000_000_000
HOUR_US = 3_600_000_000
ALL = KeyTerms("laptop", expires_at_us=NOW_US + HOUR_US)


def digest(issued: NewKey) -> bytes:
    """What is stored of an issued key."""
    return digest_of(issued.text.encode())


class Kept:
    """A store with its keys in memory, at a time that the test sets."""

    def __init__(self, data_dir: Path) -> None:
        self.log = structlog.testing.LogCapture()
        self.path = data_dir / FILE_NAME
        self.database = Database(data_dir)
        self.at_us = NOW_US
        logger = structlog.wrap_logger(None, processors=[self.log])
        self.table = KeyTable(self.database, logger, lambda: self.at_us)

    def beside(self, unit: Any) -> Any:
        """Do a unit as a command does, in a connection of its own."""
        with closing(sqlite3.connect(self.path, isolation_level=None, timeout=10)) as connection:
            return unit(connection)

    def lets_in(self, issued: NewKey) -> bool:
        """Whether the key is valid now."""
        return self.table.find(issued.text, digest(issued)) is not None


@pytest.fixture
async def kept(tmp_path: Path) -> AsyncIterator[Kept]:
    """An open, empty store, and its keys read."""
    kept = Kept(tmp_path)
    assert not kept.table.loaded
    await kept.database.open()
    await kept.table.load()
    yield kept
    await kept.database.aclose()


async def test_secrets_and_keys_end_in_time(kept: Kept):
    """The old secret ends with the overlap, and every secret when the key expires."""
    first = await kept.database.write(lambda c: keys.create(c, ALL, NOW_US))
    second = await kept.database.write(lambda c: keys.rotate(c, first.key.id, NOW_US, 1000))
    await kept.table.load()
    seen = []
    for kept.at_us in (NOW_US, NOW_US + 999, NOW_US + 1000, NOW_US + HOUR_US):
        seen.append((kept.lets_in(first), kept.lets_in(second)))
    assert seen == [(True, True), (True, True), (False, True), (False, False)]


async def test_what_is_in_memory_is_what_is_stored(kept: Kept):
    """A load reads keys made beside the server; what has not changed is not read again."""
    assert kept.table.loaded
    assert kept.table.empty
    issued = kept.beside(lambda c: keys.create(c, KeyTerms("a"), NOW_US))
    assert not kept.lets_in(issued)
    await kept.table.load()
    key = kept.table.get(issued.key.id)
    assert (key, kept.lets_in(issued), kept.table.empty) == (issued.key, True, False)
    await kept.table.load()
    assert kept.table.get(issued.key.id) is key


async def test_an_older_snapshot_does_not_bring_a_key_back(kept: Kept, monkeypatch: pytest.MonkeyPatch):
    """Of two loads at once the newer one stands, whichever ends last."""
    issued = await kept.database.write(lambda c: keys.create(c, KeyTerms("a"), NOW_US))
    await kept.table.load()
    read, held, go = kept.database.read, asyncio.Event(), asyncio.Event()

    async def slow(query: Any) -> Any:
        outcome = await read(query)
        if isinstance(outcome, tuple):
            held.set()
            await go.wait()
        return outcome

    await kept.database.write(lambda c: keys.change(c, issued.key.id, {"rpm": 5}))
    monkeypatch.setattr(kept.database, "read", slow)
    loading = asyncio.create_task(kept.table.load())
    await held.wait()
    monkeypatch.setattr(kept.database, "read", read)
    await kept.database.write(lambda c: keys.revoke(c, issued.key.id, NOW_US))
    await kept.table.load()
    go.set()
    await loading
    assert not kept.lets_in(issued)


async def test_the_table_is_kept_while_the_store_cannot_be_read(kept: Kept, monkeypatch: pytest.MonkeyPatch):
    """A fault is logged once and changes nothing; afterwards changes are seen again."""
    monkeypatch.setattr(key_table, "POLL_S", 0.001)
    issued = await kept.database.write(lambda c: keys.create(c, KeyTerms("a"), NOW_US))
    await kept.table.load()
    read, tried = kept.database.read, []

    async def failing(query: Any) -> Any:
        tried.append(query)
        raise sqlite3.OperationalError("no such table: keys_version")

    monkeypatch.setattr(kept.database, "read", failing)
    watching = asyncio.create_task(kept.table.watch())
    await until(lambda: len(tried) > 3)
    assert kept.lets_in(issued)
    monkeypatch.setattr(kept.database, "read", read)
    kept.beside(lambda c: keys.revoke(c, issued.key.id, NOW_US))
    await until(lambda: not kept.lets_in(issued))
    watching.cancel()
    assert [line["event"] for line in kept.log.entries] == ["keys_changed", "keys_unreadable", "keys_changed"]


def test_keys_have_the_stores_time():
    """UTC microseconds, as expiries and overlaps are stored."""
    at_us = key_table.now_us()
    assert 1_700_000_000_000_000 < at_us < 4_000_000_000_000_000
    assert key_table.now_us() >= at_us
