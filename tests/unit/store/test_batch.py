"""Settlements of one batch add to their days once, at its end, and to the same sums as one by one."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path

import pytest

from app.core import Usage
from app.store.database import Database
from app.store.ledger import Settlement, settle
from app.store.usage import differences
from tests.support.ledgers import reserved

USED = Usage(10, 20, 4, 5, 3)


@pytest.fixture
async def database(tmp_path: Path):
    """An open store."""
    store = Database(tmp_path)
    await store.open()
    yield store
    await store.aclose()


async def days(database: Database) -> list[tuple[int, ...]]:
    """Model, requests and completion tokens of each daily sum."""
    query = "SELECT model, requests, completion_tokens FROM usage_daily ORDER BY model"
    return await database.read(lambda c: c.execute(query).fetchall())


async def test_a_batch_adds_up(database: Database):
    """Many settlements in one transaction, of several models and one of them twice."""
    seqs = [
        await database.write(lambda c, m=model: reserved(c, model=m)) for model in ("a", "b", "a", "b", "b")
    ]
    done = [database.submit(lambda c, s=seq: settle(c, Settlement(s, USED, "stop", 1))) for seq in seqs]
    done.append(database.submit(lambda c: settle(c, Settlement(seqs[0], USED, "stop", 1))))
    commits = database.num_commits
    assert await asyncio.gather(*done) == [True] * 5 + [False]
    assert database.num_commits == commits + 1
    assert await days(database) == [("a", 2, 40), ("b", 3, 60)]
    assert await database.read(differences) == []


async def test_a_unit_that_raises_takes_only_its_own_part(database: Database):
    """The batch is done again without what the raising unit had added."""
    seqs = [await database.write(reserved) for _ in range(3)]

    def breaks(c: sqlite3.Connection) -> None:
        settle(c, Settlement(seqs[1], USED, "stop", 1))
        raise ValueError("broken")

    first = database.submit(lambda c: settle(c, Settlement(seqs[0], USED, "stop", 1)))
    broken = database.submit(breaks)
    last = database.submit(lambda c: settle(c, Settlement(seqs[2], USED, "stop", 1)))
    with pytest.raises(ValueError, match="broken"):
        await broken
    assert await first
    assert await last
    assert await days(database) == [("llama", 2, 40)]
    assert await database.read(differences) == []
