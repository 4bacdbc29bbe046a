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
from app.metering.abuse import AbuseRules, AbuseWatch, Addresses, blocked, spikes
from app.store import safety_events
from app.store.safety_events import SafetyEvent
from tests.support.admissions import key_of
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
    """Nor more than a number of the newest; gaps in the order and no events at all are no trouble."""
    assert blocked(store, RULES, NOW) == []
    block(store, 500, at_us=NOW - 48 * HOUR_US)
    store.execute("DELETE FROM safety_events WHERE seq % 3 = 0")
    block(store, 7)
    assert [flag.facts["blocks"] for flag in blocked(store, RULES, NOW)] == [7]
    assert blocked(store, AbuseRules(most_events=4), NOW) == []


@pytest.mark.parametrize(
    ("query", "values"),
    [
        (abuse._DAILY, (20261020, 20261120)),
        (abuse._REQUESTS, (20261119, 20261120)),
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


class Clock:
    """Seconds that a test sets."""

    now_s = 0.0

    def __call__(self) -> float:
        """The time."""
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    """A clock at zero."""
    return Clock()


@pytest.mark.parametrize(
    ("first", "second", "networks"),
    [
        ("192.0.2.1", "192.0.2.250", 1),
        ("192.0.2.1", "192.0.3.1", 2),
        ("2001:db8:1::1", "2001:db8:1:ffff::1", 1),
        ("2001:db8:1::1", "2001:db8:2::1", 2),
        ("::ffff:192.0.2.1", "192.0.2.9", 1),
        ("fe80::1%eth0", "fe80::2%eth1", 1),
        ("unix", "unix", 1),
        ("unix", "other", 2),
    ],
)
def test_addresses_of_one_network_count_once(clock: Clock, first: str, second: str, networks: int) -> None:
    """An IPv4 /24, an IPv6 /48, a mapped address as the IPv4 that it is, a name as it is."""
    seen, key = Addresses(clock), key_of("a")
    seen.record(key, first)
    seen.record(key, second)
    assert [networks for *_, networks in seen.within(60.0, 1)] == [networks]


def test_what_is_older_than_the_time_asked_for_does_not_count(clock: Clock) -> None:
    """The time of a network is that of its last use."""
    seen, key = Addresses(clock), key_of("a")
    seen.record(key, "192.0.2.1")
    clock.now_s = 50.0
    seen.record(key, "192.0.3.1")
    clock.now_s = 100.0
    assert [networks for *_, networks in seen.within(60.0, 1)] == [1]
    assert list(seen.within(60.0, 2)) == []


def test_no_address_is_kept(clock: Clock) -> None:
    """What is remembered differs from one process to the next, and is no part of an address."""
    first, second, key = Addresses(clock), Addresses(clock), key_of("a")
    for seen in (first, second):
        seen.record(key, "192.0.2.1")
    [[one]], [[other]] = first._seen.values(), second._seen.values()
    assert one != other
    assert bytes([192, 0, 2]) not in one


def test_memory_has_an_end(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key used longest ago goes first, and of a key the network used longest ago."""
    monkeypatch.setattr(abuse, "MAX_KEYS", 2)
    monkeypatch.setattr(abuse, "MAX_NETWORKS", 3)
    seen = Addresses(clock)
    for name in ("a", "b", "c"):
        for number in range(5):
            seen.record(key_of(name), f"192.0.{number}.1")
    assert list(seen.within(1.0, 1)) == [(key_of(name).id, key_of(name).owner, 3) for name in ("b", "c")]


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
        watch.addresses.record(key(), f"10.0.{network}.1")
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
