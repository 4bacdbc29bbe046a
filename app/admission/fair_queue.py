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
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from itertools import islice

from app.admission.estimates import LengthHistogram
from app.core import TIERS, ChatRequest, Key, Tier

GRACE_S = 10
"""How late a request may be for its appointment."""
LEAST_PART = 0.5
"""Of those told to come back, at least so many are expected, whatever was seen: all may come this time."""
_DECAY = 0.995


class ReturnRate:
    """Which part of those that were told to come back does."""

    __slots__ = ("_came", "_made")

    def __init__(self) -> None:
        self._came = self._made = 20.0  # it is believed of them until they are seen not to

    @property
    def part(self) -> float:
        """`LEAST_PART` to 1."""
        return max(self._came / self._made, LEAST_PART)

    def count(self, came: int, missed: int) -> None:
        """So many came, and so many did not, of those told one time; told of it when that is over."""
        kept = math.pow(_DECAY, came + missed)
        self._came = self._came * kept + came
        self._made = self._made * kept + came + missed


class RetrySlots:
    """One key's. Times are seconds of the same clock; a request is known by its fingerprint."""

    __slots__ = ("_by_fingerprint", "_by_second", "_came", "_due_tokens", "num", "tokens")

    def __init__(self) -> None:
        self.num = 0
        self.tokens = 0
        self._by_second: dict[int, dict[int, deque[int]]] = {}
        self._by_fingerprint: dict[int, deque[int]] = {}
        self._due_tokens: dict[int, int] = {}
        self._came: dict[int, int] = {}

    @property
    def open(self) -> bool:
        """Whether there are any whose time is not quite over."""
        return bool(self.num or self._came)

    def make(self, fingerprint: int, at_s: float, tokens: int) -> None:
        """Expect a request."""
        second = math.floor(at_s)
        self._by_second.setdefault(second, {}).setdefault(fingerprint, deque()).append(tokens)
        self._by_fingerprint.setdefault(fingerprint, deque()).append(second)
        self._due_tokens[second] = self._due_tokens.get(second, 0) + tokens
        self.num += 1
        self.tokens += tokens

    def has(self, fingerprint: int, now_s: float) -> bool:
        """Whether a request may keep one now."""
        seconds = self._by_fingerprint.get(fingerprint)
        return bool(seconds and min(seconds) <= now_s)

    def later(self, fingerprint: int, now_s: float) -> int | None:
        """For when a request is expected that has come too early."""
        return min((at for at in self._by_fingerprint.get(fingerprint, ()) if at > now_s), default=None)

    def keep(self, fingerprint: int, now_s: float) -> bool:
        """Whether a request comes to an appointment, which it then no longer has; not if it comes early."""
        seconds = self._by_fingerprint.get(fingerprint)
        if not seconds or min(seconds) > now_s:
            return False
        second = min(seconds)
        self._drop(fingerprint, second)
        self._came[second] = self._came.get(second, 0) + 1
        return True

    def close(self, now_s: float) -> tuple[int, int]:
        """Forget those whose time is over: how many of them came, and how many did not."""
        late = [second for second in self._by_second if second + GRACE_S < now_s]
        missed = [
            (fp, second) for second in late for fp, all_ in self._by_second[second].items() for _ in all_
        ]
        for fingerprint, second in missed:
            self._drop(fingerprint, second)
        over = [second for second in self._came if second + GRACE_S < now_s]
        return sum(self._came.pop(second) for second in over), len(missed)

    def due_at(self, second: int) -> int:
        """Tokens of those told that second."""
        return self._due_tokens.get(second, 0)

    def due_within(self, now_s: float, ahead_s: Sequence[int]) -> list[int]:
        """Tokens of those expected by some times from now, in their order."""
        if not self.num:
            return [0] * len(ahead_s)
        found, tokens, second = [], 0, math.floor(now_s) - GRACE_S - 1
        for ahead in ahead_s:
            until = math.floor(now_s) + ahead
            for at in range(second, until + 1):
                tokens += self._due_tokens.get(at, 0)
            second = until + 1
            found.append(tokens)
        return found

    def _drop(self, fingerprint: int, second: int) -> None:
        self._by_fingerprint[fingerprint].remove(second)
        if not self._by_fingerprint[fingerprint]:
            del self._by_fingerprint[fingerprint]
        of = self._by_second[second]
        tokens = of[fingerprint].popleft()
        self.num -= 1
        self.tokens -= tokens
        self._due_tokens[second] -= tokens
        if not of[fingerprint]:
            del of[fingerprint]
        if not of:
            del self._by_second[second]
            del self._due_tokens[second]


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


CREDIT = 1.0
"""Pools of tokens that a key may be served less than others, and make up for, while it is sent away."""
WANTED_S = 5.0
"""For how long after a refusal a key is taken to want more, where it has no appointment."""
RECENT_S = 60.0
"""For how long after a request its key is taken to be in use: who reads an answer comes again."""
FORGOTTEN_S = 600.0
"""After how long without a request a key's counters are dropped."""


class Tenants(Collection[Tenant]):
    """Every key's tenant. A request without a key belongs to its owner's."""

    def __init__(self, queue: FairQueue) -> None:
        self.active_weight = 0.0
        """Of the keys of which anything waits or runs."""
        self._queue = queue
        self._by_name: dict[str, Tenant] = {}

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[Tenant]:
        return iter(self._by_name.values())

    def __contains__(self, tenant: object) -> bool:
        return tenant in self._by_name.values()

    def come(self, request: ChatRequest, key: Key | None, now_s: float, pool_tokens: int) -> Tenant:
        """The tenant of a new request, on its key's present terms, with no more saved than it may."""
        name = request.owner if key is None else key.id
        tier: Tier = "standard" if key is None else key.terms.tier
        weight = 1.0 if key is None else key.terms.weight
        tenant = self._by_name.get(name)
        if tenant is None:
            tenant = self._by_name[name] = Tenant(name, tier, weight)
            tenant.keyed = key is not None
        elif (tenant.tier, tenant.weight) != (tier, weight):  # the key's terms were changed
            if tenant.active:
                self.active_weight += weight - tenant.weight
            tenant = self._by_name[name] = tenant.with_terms(tier, weight)
        tenant.used_at_s = now_s
        wanted = bool(tenant.retry_slots.num) or now_s - tenant.refused_at_s < WANTED_S
        self._queue.lift(tenant, CREDIT * pool_tokens if wanted else 0.0)  # who was sent away was not idle
        return tenant

    def busier(self, tenant: Tenant) -> None:
        """To be called before something of a tenant begins to wait or to run."""
        if not tenant.active:
            self.active_weight += tenant.weight

    def idler(self, tenant: Tenant) -> None:
        """To be called after something of a tenant has ended to wait or to run."""
        if not tenant.active:
            self.active_weight -= tenant.weight

    def recent_weight(self, now_s: float, *, besides: Tenant) -> float:
        """What the other keys weigh that are in use: active, or so lately that they may be again."""
        return sum(
            tenant.weight
            for tenant in self
            if tenant is not besides and (tenant.active or now_s - tenant.used_at_s < RECENT_S)
        )

    def forget_idle(self, now_s: float) -> None:
        """Drop those that have not come for long."""
        idle = [
            name
            for name, tenant in self._by_name.items()
            if now_s - tenant.used_at_s > FORGOTTEN_S and not tenant.active and not tenant.retry_slots.num
        ]
        for name in idle:
            del self._by_name[name]
