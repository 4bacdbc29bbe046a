"""Requests that wait for room, in the order in which they have their turn.

Between tiers: the higher first; but a tier whose oldest request has waited for its ageing time
has its turn too, until it has had a set share of what the tiers above it get meanwhile.

Within a tier: the key that was served least. Each has a counter of served tokens over its weight,
the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI
2024): charged as tokens are served, and in advance for what those in flight are expected to bring. A key that
comes back from idleness is lifted to the least of those waiting: it has saved nothing. One that was sent
away was not idle: the paper's queue has no end, ours has, and what it turns away wants its turn as well.

Of one key: in the order they came.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice

from app.admission.output_length import LengthHistogram
from app.admission.retry_slots import RetrySlots
from app.core import TIERS, Tier

AGEING_S: Sequence[float] = (0.0, 5.0, 30.0)
"""By tier: after how long a request is no longer passed by the tiers above without limit."""
AGED_SHARE = 0.25
"""Tokens that an aged tier gets for each that the tiers above it get."""
DEPTH = 16
"""Requests of one key that are looked at for one that has its turn."""


class Queued:
    """A request that may wait. `tokens` is what it is expected to take of the pool."""

    __slots__ = ("age_s", "bypassed_tokens", "deadline_s", "entered_s", "tenant", "tokens")

    def __init__(self, tenant: Tenant, tokens: int, entered_s: float, age_s: float = 0.0) -> None:
        self.tenant = tenant
        self.tokens = tokens
        self.entered_s = entered_s
        self.age_s = age_s
        """How long it had waited before, to be read."""
        self.deadline_s = 0.0
        self.bypassed_tokens = 0


class Tenant:
    """One key's requests: waiting, in flight, and what it has been served."""

    def __init__(self, name: str, tier: Tier, weight: float) -> None:
        self.name = name
        self.rank = TIERS.index(tier)
        self.weight = weight
        self.keyed = True
        """Whether it is of a stored key: then there may be others, though none has come yet."""
        self.served = 0.0
        """The virtual token counter."""
        self.waiting: dict[Queued, None] = {}
        self.waiting_tokens = 0
        self.num_in_flight = self.choices_in_flight = 0
        self.in_flight_tokens = 0
        self.used_at_s = 0.0
        self.refused_at_s = -math.inf
        """When a request was last sent away for want of room."""
        self.lengths = LengthHistogram()
        self.cached_part = 0.0
        """Of a prompt's tokens that no other in flight has: which part the engine had cached, lately."""
        self.retry_slots = RetrySlots()

    @property
    def tier(self) -> Tier:
        """The key's tier."""
        return TIERS[self.rank]

    def with_terms(self, tier: Tier, weight: float) -> Tenant:
        """Take on a key's new terms.

        In another tier it is another tenant: what waits keeps its place; tiers count from different starts.
        """
        self.weight = weight
        if tier == self.tier:
            return self
        tenant = Tenant(self.name, tier, weight)
        tenant.keyed, tenant.lengths, tenant.cached_part = self.keyed, self.lengths, self.cached_part
        tenant.retry_slots = self.retry_slots
        return tenant

    @property
    def mean_tokens(self) -> float:
        """What its requests are expected to take, of those that wait, or else of those in flight."""
        if self.waiting:
            return self.waiting_tokens / len(self.waiting)
        return self.in_flight_tokens / self.num_in_flight if self.num_in_flight else 0.0

    @property
    def active(self) -> bool:
        """Whether anything of it waits or runs."""
        return bool(self.num_in_flight or self.waiting)

    def charge(self, tokens: float) -> None:
        """Count tokens as served, or take back (negative) what was charged too much."""
        self.served += tokens / self.weight


class _Level:
    """A tier's queue."""

    __slots__ = ("credit", "last_served", "tenants", "waiting")

    def __init__(self) -> None:
        self.tenants: dict[Tenant, None] = {}
        self.waiting: dict[Queued, None] = {}
        self.last_served = 0.0
        self.credit = 0.0


class FairQueue:
    """All that waits."""

    def __init__(self) -> None:
        self.tokens = 0
        self._levels = tuple(_Level() for _ in TIERS)

    def __len__(self) -> int:
        return sum(len(level.waiting) for level in self._levels)

    def __bool__(self) -> bool:
        return any(level.waiting for level in self._levels)

    def __iter__(self) -> Iterator[Queued]:
        for level in self._levels:
            yield from level.waiting

    def depth(self, rank: int) -> int:
        """Requests of a tier that wait."""
        return len(self._levels[rank].waiting)

    def waiting_tokens(self, rank: int) -> int:
        """What requests of a tier that wait are expected to take."""
        return sum(queued.tokens for queued in self._levels[rank].waiting)

    def waited_s(self, rank: int, now_s: float) -> float:
        """How long the oldest of a tier has waited; 0 when there is none."""
        oldest = next(iter(self._levels[rank].waiting), None)
        return 0.0 if oldest is None else now_s - oldest.entered_s

    def lift(self, tenant: Tenant, credit_tokens: float = 0.0) -> None:
        """Let go of what a key that has nothing waiting has not used: to be called when it comes.

        All but `credit_tokens`: of what it would have used, had it not been sent away.
        """
        if tenant.waiting:
            return
        level = self._levels[tenant.rank]
        floor = min((other.served for other in level.tenants), default=level.last_served)
        tenant.served = max(tenant.served, floor - credit_tokens / tenant.weight)

    def enter(self, queued: Queued) -> None:
        """Take a place."""
        tenant, level = queued.tenant, self._levels[queued.tenant.rank]
        tenant.waiting[queued] = level.waiting[queued] = None
        level.tenants[tenant] = None
        tenant.waiting_tokens += queued.tokens
        self.tokens += queued.tokens

    def remove(self, queued: Queued) -> None:
        """Give up its place."""
        tenant, level = queued.tenant, self._levels[queued.tenant.rank]
        del tenant.waiting[queued]
        del level.waiting[queued]
        if not tenant.waiting:
            del level.tenants[tenant]
        if not level.waiting:
            level.credit = 0.0
        tenant.waiting_tokens -= queued.tokens
        self.tokens -= queued.tokens

    def served(self, queued: Queued, now_s: float) -> None:
        """Note whose turn it was, before it is charged for it."""
        rank = queued.tenant.rank
        self._levels[rank].last_served = queued.tenant.served
        if self._aged(rank, now_s):
            self._levels[rank].credit -= queued.tokens
        for lower in range(rank + 1, len(TIERS)):
            if self._aged(lower, now_s):
                level = self._levels[lower]
                level.credit = min(level.credit + AGED_SHARE * queued.tokens, queued.tokens)

    def in_turn(self, now_s: float) -> Iterator[Queued]:
        """Those waiting, in the order of their turns as things stand; not to be changed meanwhile."""
        aged = [r for r in range(1, len(TIERS)) if self._aged(r, now_s) and self._levels[r].credit >= 0]
        for rank in (*reversed(aged), *(r for r in range(len(TIERS)) if r not in aged)):
            for tenant in sorted(self._levels[rank].tenants, key=_served):
                yield from islice(tenant.waiting, DEPTH)

    def waits_above(self, tenant: Tenant) -> bool:
        """Whether a higher tier waits."""
        return any(level.waiting for level in self._levels[: tenant.rank])

    def overdue(self, now_s: float) -> list[Queued]:
        """Those whose deadline has passed. In a tier deadlines are in the order of entering."""
        found = []
        for level in self._levels:
            for queued in level.waiting:
                if queued.deadline_s > now_s:
                    break
                found.append(queued)
        return found

    def _aged(self, rank: int, now_s: float) -> bool:
        return rank > 0 and bool(self._levels[rank].waiting) and self.waited_s(rank, now_s) >= AGEING_S[rank]


def _served(tenant: Tenant) -> tuple[float, float]:
    return tenant.served, tenant.in_flight_tokens / tenant.weight
