"""Keys that look abused: flags for admins, from the ledger's daily sums and the safety events.

    spike      an owner's tokens today against the owner's own days before
    blocks     what the screens blocked of a key within a day, in number and as a share of its requests
    addresses  networks from which one key was used within an hour, kept in memory alone

Flags are computed when they are asked for, and nothing is done about them: who is flagged is served on.
The queries read some hundred rows by their keys, and at most `most_events` safety events.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Literal, NamedTuple, get_args

from app.errors import StorageUnavailable
from app.metering.addresses import Addresses
from app.store.database import Database
from app.store.ledger import day_of

Kind = Literal["spike", "blocks", "addresses"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_US_PER_S = 1_000_000
_DAY_S = 86_400


@dataclass(frozen=True, slots=True)
class AbuseRules:
    """The thresholds at which a key is flagged."""

    history_days: int = 28
    least_days: int = 3
    """Days with requests that an owner must have had; before that nothing is usual."""
    spike_factor: float = 5.0
    """Times the owner's median day, and half as much again as the owner's largest."""
    spike_tokens: int = 100_000
    """Fewer than these are no spike."""
    blocks: int = 5
    blocks_share: float = 0.02
    grave_blocks: int = 3
    """Blocks in a grave category that are enough, whatever their share."""
    grave: frozenset[str] = frozenset({"S4", "S9"})
    most_events: int = 50_000
    networks: int = 10
    networks_within_s: float = 3600.0


@dataclass(frozen=True, slots=True)
class Flag:
    """One reason to look at a key. `key_id` is None where the owner is all that is known."""

    kind: Kind
    owner: str
    key_id: str | None
    since_us: int
    """The start of the period that was counted, UTC microseconds."""
    facts: Mapping[str, Any] = field(default_factory=dict)


class Blocks(NamedTuple):
    """The blocked requests of one key."""

    owner: str
    key_id: str | None
    total: int
    categories: Counter[str]


class AbuseWatch:
    """The flags as they are now, read at most once in `fresh_s`."""

    def __init__(
        self,
        database: Database,
        rules: AbuseRules | None = None,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
        fresh_s: float = 30.0,
    ) -> None:
        self.rules = rules or AbuseRules()
        self.addresses = Addresses(clock_s)
        self.flags: list[Flag] = []
        """The flags as of the last `read`."""
        self._database = database
        self._clock_s = clock_s
        self._wall_us = wall_us
        self._fresh_s = fresh_s
        self._read_s: float | None = None
        self._refreshing: asyncio.Task[None] | None = None

    @property
    def counts(self) -> Mapping[str, int]:
        """Flags by kind, as of the last `read`."""
        by_kind = Counter(flag.kind for flag in self.flags)
        return {kind: by_kind[kind] for kind in KINDS}

    async def read(self) -> list[Flag]:
        """The flags. Raises StorageUnavailable."""
        now_s = self._clock_s()
        if self._read_s is None or now_s - self._read_s >= self._fresh_s:
            at_us, rules = self._wall_us(), self.rules
            stored = await self._database.read(
                lambda c: [*spikes(c, rules, at_us), *blocked(c, rules, at_us)]
            )
            self.flags = [*stored, *self._roaming(at_us)]
            self._read_s = now_s
        return self.flags

    async def refresh(self, wait_s: float = 1.0) -> None:
        """Read the flags for a scrape, which waits no longer than this; a fault leaves them as they were."""
        if self._refreshing is None or self._refreshing.done():
            self._refreshing = asyncio.create_task(self._read_if_possible(), name="abuse")
        await asyncio.wait({self._refreshing}, timeout=wait_s)

    async def _read_if_possible(self) -> None:
        with contextlib.suppress(StorageUnavailable):
            await self.read()

    def _roaming(self, at_us: int) -> Iterator[Flag]:
        rules = self.rules
        since_us = at_us - int(rules.networks_within_s * _US_PER_S)
        for used in self.addresses.within(rules.networks_within_s, rules.networks):
            yield Flag("addresses", used.owner, used.key_id, since_us, {"networks": used.networks})


def spikes(c: sqlite3.Connection, rules: AbuseRules, at_us: int) -> list[Flag]:
    """Owners who have used many times today what they use in a day; from the daily sums."""
    today = day_of(at_us)
    rows = c.execute(_DAILY, (_day_before(at_us, rules.history_days), today)).fetchall()
    days: dict[str, dict[int, int]] = defaultdict(dict)
    for owner, day, tokens in rows:
        days[owner][day] = tokens
    flags = []
    for owner, by_day in days.items():
        tokens = by_day.pop(today, 0)
        if tokens < rules.spike_tokens or len(by_day) < rules.least_days:
            continue
        earlier = sorted(by_day.values())
        usual, peak = earlier[len(earlier) // 2], earlier[-1]
        if tokens >= max(rules.spike_factor * usual, 1.5 * peak):
            facts = {"tokens": tokens, "usual_tokens": usual, "most_tokens": peak, "days": len(earlier)}
            flags.append(Flag("spike", owner, None, _midnight_us(at_us), facts))
    return flags


_DAILY = (
    "SELECT owner, day, sum(prompt_tokens + completion_tokens) FROM usage_daily"
    " WHERE day >= ? AND day <= ? GROUP BY owner, day"
)
_REQUESTS = "SELECT owner, sum(requests) FROM usage_daily WHERE day >= ? AND day <= ? GROUP BY owner"


def blocked(c: sqlite3.Connection, rules: AbuseRules, at_us: int) -> list[Flag]:
    """Keys of which the screens have blocked much within a day."""
    since_us = at_us - _DAY_S * _US_PER_S
    by_kind = _blocks_since(c, since_us, rules.most_events)
    if not by_kind:
        return []
    days = (day_of(since_us), day_of(at_us))
    served: dict[str, int] = dict(c.execute(_REQUESTS, days).fetchall())
    flags = []
    for owner_blocks in by_kind:
        grave = sum(owner_blocks.categories[category] for category in rules.grave)
        share = owner_blocks.total / (owner_blocks.total + served.get(owner_blocks.owner, 0))
        if grave >= rules.grave_blocks or (
            owner_blocks.total >= rules.blocks and share >= rules.blocks_share
        ):
            facts = {
                "blocks": owner_blocks.total,
                "share": round(share, 4),
                "categories": dict(owner_blocks.categories),
            }
            flags.append(Flag("blocks", owner_blocks.owner, owner_blocks.key_id, since_us, facts))
    return flags


_FIRST = "SELECT seq, at_us FROM safety_events WHERE seq >= ? ORDER BY seq LIMIT 1"
_LAST = "SELECT max(seq) FROM safety_events"
_BLOCKED = (
    "SELECT owner, key_id, category, count(DISTINCT request_id) FROM safety_events"
    " WHERE seq >= ? AND at_us >= ? AND action = 'block' GROUP BY owner, key_id, category"
)


def _blocks_since(c: sqlite3.Connection, since_us: int, most_events: int) -> list[Blocks]:
    (last,) = c.execute(_LAST).fetchone()
    if last is None:
        return []
    first = max(_first_since(c, since_us, last), last - most_events + 1)
    by_kind: dict[tuple[str, str | None], Counter[str]] = defaultdict(Counter)
    for owner, key_id, category, count in c.execute(_BLOCKED, (first, since_us)):
        by_kind[owner, key_id][category or "none"] += count
    return [Blocks(owner, key_id, sum(by.values()), by) for (owner, key_id), by in by_kind.items()]


def _first_since(c: sqlite3.Connection, since_us: int, last: int) -> int:
    """The place from which on events are not older: they are in the order of time, nearly."""
    low, high = 1, last + 1
    while low < high:
        middle = (low + high) // 2
        row = c.execute(_FIRST, (middle,)).fetchone()
        if row is not None and row[1] < since_us:
            low = row[0] + 1
        else:
            high = middle
    return low


def _day_before(at_us: int, days: int) -> int:
    at = datetime.fromtimestamp(at_us // _US_PER_S, UTC) - timedelta(days=days)
    return at.year * 10_000 + at.month * 100 + at.day


def _midnight_us(at_us: int) -> int:
    return at_us - at_us % (_DAY_S * _US_PER_S)
