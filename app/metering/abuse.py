"""Keys that look abused: flags for admins, from the ledger's daily sums and the safety events.

    spike      an owner's tokens today against the owner's own days before
    blocks     what the screens blocked of a key within a day, in number and as a share of its requests
    addresses  networks from which one key was used within an hour; hashes of them, in memory alone

Flags are computed when they are asked for, and nothing is done about them: who is flagged is served on.
The queries read some hundred rows by their keys, and at most `most_events` safety events.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import ipaddress
import json
import secrets
import sqlite3
import time
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from app.core import Key
from app.errors import StorageUnavailable
from app.store.database import Database
from app.store.ledger import day_of

Kind = Literal["spike", "blocks", "addresses"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_US_PER_S = 1_000_000
_DAY_US = 86_400 * _US_PER_S
MAX_KEYS = 10_000
MAX_NETWORKS = 256
"""Networks that are counted for a key; more of them count as this many."""
FRESH_S = 30.0
"""Seconds for which the flags that were read last are shown again."""


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
    """Blocks in a grave category that suffice at any share."""
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


class Addresses:
    """The networks of each key, and when each was seen last; the least recently used key is dropped first."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._secret = secrets.token_bytes(16)
        self._seen: OrderedDict[tuple[str, str], OrderedDict[bytes, float]] = OrderedDict()

    def record(self, key: Key, address: str) -> None:
        """A key was used from an address: an IPv4 /24, an IPv6 /48, or a name as it is."""
        network = hashlib.blake2b(_network(address), digest_size=8, key=self._secret).digest()
        networks = self._seen.setdefault((key.id, key.owner), OrderedDict())
        self._seen.move_to_end((key.id, key.owner))
        networks[network] = self._clock_s()
        networks.move_to_end(network)
        if len(networks) > MAX_NETWORKS:
            networks.popitem(last=False)
        if len(self._seen) > MAX_KEYS:
            self._seen.popitem(last=False)

    def within(self, duration_s: float, least: int) -> Iterator[tuple[str, str, int]]:
        """Id, owner and networks of the keys that were used from at least so many within the last seconds."""
        since_s = self._clock_s() - duration_s
        for (key_id, owner), networks in self._seen.items():
            count = sum(at_s >= since_s for at_s in networks.values()) if len(networks) >= least else 0
            if count >= least:
                yield key_id, owner, count


class AbuseWatch:
    """The flags as they are now, read at most once in `FRESH_S`."""

    def __init__(
        self,
        database: Database,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        wall_us: Callable[[], int] = lambda: time.time_ns() // 1000,
    ) -> None:
        self._rules = AbuseRules()
        self.addresses = Addresses(clock_s)
        self.flags: list[Flag] = []
        """The flags as of the last `read`."""
        self._database = database
        self._clock_s = clock_s
        self._wall_us = wall_us
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
        if self._read_s is None or now_s - self._read_s >= FRESH_S:
            at_us, rules = self._wall_us(), self._rules
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
        rules = self._rules
        since_us = at_us - int(rules.networks_within_s * _US_PER_S)
        for key_id, owner, networks in self.addresses.within(rules.networks_within_s, rules.networks):
            yield Flag("addresses", owner, key_id, since_us, {"networks": networks})


def spikes(c: sqlite3.Connection, rules: AbuseRules, at_us: int) -> list[Flag]:
    """Owners who have used many times today what they use in a day; from the daily sums."""
    today = day_of(at_us)
    rows = c.execute(_DAILY, (day_of(at_us - rules.history_days * _DAY_US), today)).fetchall()
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
            flags.append(Flag("spike", owner, None, at_us - at_us % _DAY_US, facts))
    return flags


_DAILY = (
    "SELECT owner, day, sum(prompt_tokens + completion_tokens) FROM usage_daily"
    " WHERE day >= ? AND day <= ? GROUP BY owner, day"
)
_REQUESTS = "SELECT owner, sum(requests) FROM usage_daily WHERE day >= ? AND day <= ? GROUP BY owner"
_BLOCKED = (
    "SELECT owner, key_id, sum(num), json_group_object(category, num) FROM ("
    "SELECT owner, key_id, coalesce(category, 'none') AS category, count(DISTINCT request_id) AS num"
    " FROM safety_events WHERE seq > (SELECT max(seq) FROM safety_events) - ? AND at_us >= ?"
    " AND action = 'block' GROUP BY owner, key_id, category) GROUP BY owner, key_id"
)


def blocked(c: sqlite3.Connection, rules: AbuseRules, at_us: int) -> list[Flag]:
    """Keys of which the screens have blocked much within a day."""
    since_us = at_us - _DAY_US
    served: dict[str, int] = dict(c.execute(_REQUESTS, (day_of(since_us), day_of(at_us))).fetchall())
    flags = []
    for owner, key_id, blocks, by_category in c.execute(_BLOCKED, (rules.most_events, since_us)):
        categories: dict[str, int] = json.loads(by_category)
        grave = sum(categories.get(category, 0) for category in rules.grave)
        share = blocks / (blocks + served.get(owner, 0))
        if grave >= rules.grave_blocks or (blocks >= rules.blocks and share >= rules.blocks_share):
            facts = {"blocks": blocks, "share": round(share, 4), "categories": categories}
            flags.append(Flag("blocks", owner, key_id, since_us, facts))
    return flags


def _network(address: str) -> bytes:
    try:
        ip = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address.encode("utf-8", "surrogatepass")
    if isinstance(ip, ipaddress.IPv4Address):
        return ip.packed[:3]
    mapped = ip.ipv4_mapped
    return ip.packed[:6] if mapped is None else mapped.packed[:3]
