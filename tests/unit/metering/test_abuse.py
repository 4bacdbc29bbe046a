"""Abuse flags: what is one and what is not, that the queries are by key, and that nothing is written."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Callable
from typing import Any, TypeVar

import pytest

from app.core import Key, KeyTerms, Usage
from app.errors import StorageUnavailable
from app.metering import abuse
from app.metering.abuse import AbuseRules, AbuseWatch, blocked, spikes
from app.metering.addresses import MAX_KEYS, MAX_NETWORKS, Addresses
from app.store import safety_events
from app.store.safety_events import SafetyEvent
from tests.support.ledgers import at, empty_store, settled

T = TypeVar("T")
NOW = at("2026-11-20T12:00")
HOUR_US = 3_600_000_000
RULES = AbuseRules()


@pytest.fixture
def store() -> sqlite3.Connection:
    """An empty store."""
    return empty_store()


def used(c: sqlite3.Connection, day: str, tokens: int, owner: str = "ann", model: str = "llama") -> None:
    """A request of so many tokens."""
    settled(c, Usage(prompt_tokens=tokens), created_at_us=at(day), owner=owner, model=model)


def usual_days(c: sqlite3.Connection, tokens: int, days: int = 5, owner: str = "ann") -> None:
    """Days before today with so many tokens each."""
    for day in range(days):
        used(c, f"2026-11-{19 - day}", tokens, owner)


def block(c: sqlite3.Connection, times: int = 1, **fields: Any) -> None:
    """Blocked prompts of ann's key, an hour ago."""
    for _ in range(times):
        known = {
            "at_us": NOW - HOUR_US,
            "request_id": f"req_{c.total_changes}",
            "owner": "ann",
            "key_id": "tr-a",
            "model": "llama",
            "subject": "prompt",
            "stage": "encoder",
            "action": "block",
            "category": "S2",
            "score": 0.9,
            "threshold": 0.6,
            "policy_hash": "p",
        }
        safety_events.add(c, SafetyEvent(**known | fields))


def test_a_day_of_many_times_the_usual_is_a_spike(store: sqlite3.Connection) -> None:
    """Five times the owner's median day, from 100,000 tokens on, over all models; told with the numbers."""
    usual_days(store, 50_000)
    used(store, "2026-11-20", 150_000)
    assert spikes(store, RULES, NOW) == []
    used(store, "2026-11-20", 100_000, model="other")
    [flag] = spikes(store, RULES, NOW)
    assert (flag.kind, flag.owner, flag.key_id, flag.since_us) == ("spike", "ann", None, at("2026-11-20"))
    assert flag.facts == {"tokens": 250_000, "usual_tokens": 50_000, "most_tokens": 50_000, "days": 5}


def test_what_is_no_spike(store: sqlite3.Connection) -> None:
    """A new owner, a small one, one who had such a day before, and one whose spike was yesterday."""
    usual_days(store, 10, days=2, owner="new")
    used(store, "2026-11-20", 10**7, "new")
    usual_days(store, 10, owner="small")
    used(store, "2026-11-20", 99_999, "small")
    usual_days(store, 50_000, owner="batch")
    used(store, "2026-11-01", 10**6, "batch")
    used(store, "2026-11-20", 10**6, "batch")
    usual_days(store, 10, owner="past")
    used(store, "2026-11-19", 10**7, "past")
    assert spikes(store, RULES, NOW) == []


def test_history_ends(store: sqlite3.Connection) -> None:
    """Days of more than four weeks ago are nobody's usual ones."""
    for day in ("2026-10-01", "2026-10-02", "2026-10-03"):
        used(store, day, 1000)
    used(store, "2026-11-20", 10**6)
    assert spikes(store, RULES, NOW) == []


def test_repeated_blocks_are_flagged(store: sqlite3.Connection) -> None:
    """Five within a day; which categories, and their share of the requests."""
    block(store, 4)
    assert blocked(store, RULES, NOW) == []
    block(store, category="S10")
    for _ in range(5):
        used(store, "2026-11-20", 10)
    [flag] = blocked(store, RULES, NOW)
    assert (flag.kind, flag.owner, flag.key_id, flag.since_us) == (
        "blocks",
        "ann",
        "tr-a",
        NOW - 24 * HOUR_US,
    )
    assert flag.facts == {"blocks": 5, "share": 0.5, "categories": {"S2": 4, "S10": 1}}


def test_a_few_blocks_among_many_requests_are_none(store: sqlite3.Connection) -> None:
    """An application with a thousand users has some who ask for it; a grave category counts all the same."""
    for _ in range(300):
        used(store, "2026-11-20", 10)
    block(store, 6)
    assert blocked(store, RULES, NOW) == []
    block(store, 2, category="S4")
    assert blocked(store, RULES, NOW) != []  # eight of 308
    used(store, "2026-11-20", 10)
    for _ in range(500):
        used(store, "2026-11-20", 10)
    assert blocked(store, RULES, NOW) == []
    block(store, category="S4")
    [flag] = blocked(store, RULES, NOW)
    assert flag.facts["categories"] == {"S2": 6, "S4": 3}


def test_what_counts_as_a_block(store: sqlite3.Connection) -> None:
    """Not what is old, not what was let pass, and a request once, whatever screens it ran into."""
    block(store, 9, at_us=NOW - 25 * HOUR_US)
    block(store, 9, action="flag")
    block(store, 9, request_id="req_same")
    block(store, 4, key_id="tr-b")
    assert blocked(store, RULES, NOW) == []
    block(store, 4, category=None)
    [flag] = blocked(store, RULES, NOW)
    assert flag.facts["categories"] == {"S2": 1, "none": 4}


def test_keys_of_an_owner_are_counted_apart(store: sqlite3.Connection) -> None:
    """As are requests without a key."""
    block(store, 5)
    block(store, 5, key_id=None, owner="local")
    assert {(flag.owner, flag.key_id) for flag in blocked(store, RULES, NOW)} == {
        ("ann", "tr-a"),
        ("local", None),
    }


def test_events_before_the_day_are_not_read(store: sqlite3.Connection) -> None:
    """The first of the day is found by halving; gaps in the order and no events at all are no trouble."""
    assert blocked(store, RULES, NOW) == []
    block(store, 500, at_us=NOW - 48 * HOUR_US)
    store.execute("DELETE FROM safety_events WHERE seq % 3 = 0")
    block(store, 7)
    (last,) = store.execute("SELECT max(seq) FROM safety_events").fetchone()
    assert abuse._first_since(store, NOW - 24 * HOUR_US, last) > 490
    assert [flag.facts["blocks"] for flag in blocked(store, RULES, NOW)] == [7]
    assert blocked(store, AbuseRules(most_events=4), NOW) == []


@pytest.mark.parametrize(
    ("query", "values"),
    [
        (abuse._DAILY, (20261020, 20261120)),
        (abuse._REQUESTS, (20261119, 20261120)),
        (abuse._FIRST, (1,)),
        (abuse._LAST, ()),
        (abuse._BLOCKED, (1, 1)),
    ],
)
def test_queries_go_by_key(store: sqlite3.Connection, query: str, values: tuple[int, ...]) -> None:
    """No table is read from its beginning to its end."""
    plan = [row[3] for row in store.execute(f"EXPLAIN QUERY PLAN {query}", values)]
    tables = [step for step in plan if "usage_daily" in step or "safety_events" in step]
    assert tables, plan
    assert all(step.startswith("SEARCH") for step in tables), plan


def key(key_id: str = "tr-a") -> Key:
    """A key of ann's."""
    return Key(key_id, "ann", KeyTerms(key_id), 0)


def test_networks_are_counted_within_an_hour() -> None:
    """Addresses of one network are one, in IPv6 too; what was an hour ago is forgotten."""
    now_s = 0.0
    addresses = Addresses(lambda: now_s)
    for host in range(50):
        addresses.saw(key(), f"192.0.2.{host}")
        addresses.saw(key(), f"2001:db8:7::{host:x}")
        addresses.saw(key(), f"::ffff:192.0.2.{host}")
    assert [one.networks for one in addresses.within(3600, 1)] == [2]
    for network in range(8):
        addresses.saw(key(), f"10.0.{network}.1")
    assert list(addresses.within(3600, 10)) == [("tr-a", "ann", 10)]
    assert list(addresses.within(3600, 11)) == []
    now_s = 3601.0
    addresses.saw(key(), "testclient")
    assert [one.networks for one in addresses.within(3600, 1)] == [1]


def test_addresses_are_bounded_and_not_kept() -> None:
    """Keys and networks have a number that they do not pass, and no address is in memory."""
    addresses = Addresses(lambda: 0.0)
    for network in range(2 * MAX_NETWORKS):
        addresses.saw(key(), f"10.{network // 256}.{network % 256}.1")
    assert [one.networks for one in addresses.within(1, 1)] == [MAX_NETWORKS]
    for number in range(MAX_KEYS + 5):
        addresses.saw(key(f"tr-{number}"), "192.0.2.1")
    assert len(addresses._seen) == MAX_KEYS
    assert "192.0" not in repr(addresses._seen)


class ReadsNever:
    """A store whose readers are all busy, or that cannot be read."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.reads = 0

    async def read(self, query: object) -> None:
        """See Database.read."""
        del query
        self.reads += 1
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


async def test_a_scrape_waits_for_no_store() -> None:
    """Busy readers are asked once, not at every scrape; a store that fails leaves the flags as they were."""
    busy = ReadsNever()
    watch = AbuseWatch(busy)  # type: ignore[arg-type]
    await watch.refresh(0.001)
    await watch.refresh(0.001)
    assert busy.reads == 1
    assert watch._refreshing is not None
    watch._refreshing.cancel()
    broken = ReadsNever(StorageUnavailable("The disk is full."))
    watch = AbuseWatch(broken)  # type: ignore[arg-type]
    await watch.refresh()
    await watch.refresh()
    assert broken.reads == 2
    assert watch.flags == []


class ReadsHere:
    """A store read in the test's own thread, which counts how often."""

    def __init__(self, store: sqlite3.Connection) -> None:
        self.store = store
        self.reads = 0

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        """See Database.read; a query that writes fails."""
        self.reads += 1
        self.store.execute("PRAGMA query_only = ON")
        return query(self.store)


async def test_flags_of_all_kinds_are_listed_and_counted(store: sqlite3.Connection) -> None:
    """Read at most once in half a minute; every kind has a number, 0 too."""
    now_s = 100.0
    reads = ReadsHere(store)
    watch = AbuseWatch(reads, clock_s=lambda: now_s, wall_us=lambda: NOW)  # type: ignore[arg-type]
    assert watch.counts == {"spike": 0, "blocks": 0, "addresses": 0}
    usual_days(store, 10)
    used(store, "2026-11-20", 10**6)
    block(store, 5)
    for network in range(10):
        watch.addresses.saw(key(), f"10.0.{network}.1")
    assert [(f.kind, f.owner, f.key_id) for f in await watch.read()] == [
        ("spike", "ann", None),
        ("blocks", "ann", "tr-a"),
        ("addresses", "ann", "tr-a"),
    ]
    assert watch.counts == {"spike": 1, "blocks": 1, "addresses": 1}
    now_s += 29
    await watch.read()
    assert reads.reads == 1
    now_s += 4000
    assert [f.kind for f in await watch.read()] == ["spike", "blocks"]
