"""How often an owner may read the store, and how many reads there are at once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.core import Key, KeyTerms
from app.errors import RateLimited
from app.metering.limits import Limiter
from app.metering.reads import BURST_S, MAX_READERS, MAX_WAITING, Reads
from app.store.database import READERS

KEY = Key("tr-a", "ann", KeyTerms("ann"), 0)


def test_so_many_a_second_and_ten_seconds_worth_at_once():
    """Then it is 429, counted by the key's tier, until the time it tells; another owner is let in."""
    now_s, limiter = [100.0], Limiter()
    reads = Reads(limiter, 2.0, lambda: now_s[0])
    for _ in range(int(2 * BURST_S)):
        reads.charge("ann", KEY)
    with pytest.raises(RateLimited, match="max_reads_per_s") as caught:
        reads.charge("ann", KEY)
    assert caught.value.retry_after_s == 1
    assert limiter.refused["standard"]["reads"] == 1
    reads.charge("bob", None)
    now_s[0] += 1
    for _ in range(2):
        reads.charge("ann", KEY)
    with pytest.raises(RateLimited):
        reads.charge("ann", KEY)
    now_s[0] += 3600
    for _ in range(int(2 * BURST_S)):
        reads.charge("ann", KEY)


@pytest.mark.parametrize(("max_per_s", "num"), [(0.0, 10_000), (0.001, 1)])
def test_no_limit_and_a_small_one(max_per_s: float, num: int):
    """0 is none; below one in ten seconds it is still one at a time."""
    reads = Reads(Limiter(), max_per_s, lambda: 0.0)
    for _ in range(num):
        reads.charge("ann", KEY)


async def test_readers_are_left_for_chat():
    """Whoever reads, and however many, some of the store's readers are idle; a caller has one."""
    reads, reading, most = Reads(Limiter(), 0.0), [0], [0]

    async def read(owner: str) -> None:
        async with reads.slot(owner):
            reading[0] += 1
            most[0] = max(most[0], reading[0])
            await asyncio.sleep(0)
            reading[0] -= 1

    await asyncio.gather(*(read("ann") for _ in range(8)))
    assert most == [1]
    await asyncio.gather(*(read(f"owner {i % 5}") for i in range(40)))
    assert most == [MAX_READERS]
    assert MAX_READERS < READERS


async def test_what_waits_is_bounded():
    """A caller with too many reads in progress is 429, and told so."""
    reads, done = Reads(Limiter(), 0.0), asyncio.Event()

    async def read() -> Any:
        async with reads.slot("ann"):
            await done.wait()

    waiting = [asyncio.create_task(read()) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(RateLimited, match="one after the other"):
        await read()
    done.set()
    await asyncio.gather(*waiting)
    await read()


def test_owner_without_a_stored_key_is_refused_all_the_same():
    """There is no tier to count it by."""
    limiter = Limiter()
    reads = Reads(limiter, 0.1, lambda: 0.0)
    reads.charge("local", None)
    with pytest.raises(RateLimited):
        reads.charge("local", None)
    assert all(not sum(refused.values()) for refused in limiter.refused.values())
