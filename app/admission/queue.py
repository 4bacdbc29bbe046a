"""The queue of admission: waiting requests in a fair order, and the keys that they belong to.

Between tiers: the higher first. A tier whose oldest request has waited for its ageing time goes before it,
until it has had a set share of what the tiers above it get meanwhile.

Within a tier: the key that was served least. Each has a counter of served tokens over its weight, the virtual
token counter of Sheng et al., "Fairness in Serving Large Language Models" (OSDI 2024): charged as tokens are
served, and in advance for what requests in flight are expected to bring. Idle keys accrue no credit: one that
returns is lifted to the least of those waiting. A key that was refused was not idle: the paper's queue has no
bound, ours has.

Of one key: in the order of arrival.

The queue does not watch clients: `Admission.withdraw` and `_admission_of` (app.admission.admit) take the
request of one that leaves out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice

from app.admission.estimates import LengthHistogram
from app.admission.tuning import AdmissionTuning
from app.core import TIERS, ChatRequest, Key, Tier


class AdmissionRequest:
    """A request that may wait. `tokens` is what it is expected to take of the KV memory.

    `Admission.precheck` weighs a bare one, before rendering, and puts it into no queue. What waits and is
    admitted is a `Ticket` (app.admission.ticket), which has a rendered prompt too, and room in the engine.
    """

    def __init__(
        self, tenant: Tenant, tokens: int, entered_s: float, age_s: float = 0.0, fingerprint: int = 0
    ) -> None:
        self.tenant = tenant
        self.tokens = tokens
        self.uncached_tokens = 0
        """Tokens of its prompt that the engine has to compute; until the first token, those that it shares
        with no other."""
        self.entered_s = entered_s
        self.age_s = age_s
        """Seconds in the socket, before it was read."""
        self.fingerprint = fingerprint
        """The hash by which the request is recognised when it is sent again."""
        self.bypassed_tokens = 0

    def record_bypass(self, tokens: int) -> None:
        """Count the tokens of a request that was admitted before this one, which was first in order."""
        self.bypassed_tokens += tokens


class Tenant:
    """One key's requests: waiting, in flight, and what it has been served."""

    def __init__(
        self,
        name: str,
        tier: Tier,
        weight: float,
        tuning: AdmissionTuning,
        *,
        keyed: bool = True,
        lengths: LengthHistogram | None = None,
    ) -> None:
        self.name, self.tier, self.weight = name, tier, weight
        self.rank = TIERS.index(tier)
        self.keyed = keyed
        """True if it is of a stored key: then there may be others, though none has sent anything yet."""
        self.served = 0.0
        """The virtual token counter."""
        self.waiting: dict[AdmissionRequest, None] = {}
        self.waiting_tokens = self.waiting_uncached_tokens = 0
        self.num_in_flight = self.choices_in_flight = self.in_flight_tokens = 0
        self.used_at_s = 0.0
        self.refused_at_s = self.wanted_until_s = -math.inf
        self.lengths = lengths or LengthHistogram(tuning)

    @property
    def mean_tokens(self) -> float:
        """Expected tokens of one of its requests: of those that wait, or else of those in flight."""
        if self.waiting:
            return self.waiting_tokens / len(self.waiting)
        return self.in_flight_tokens / self.num_in_flight if self.num_in_flight else 0.0

    @property
    def active(self) -> bool:
        """True if a request of it waits or runs."""
        return bool(self.num_in_flight or self.waiting)

    def charge(self, tokens: float) -> None:
        """Count tokens as served, or take back (negative) what was charged too much."""
        self.served += tokens / self.weight

    def touch(self, now_s: float, served: float) -> None:
        """Note that it is in use, and lift its counter to `served`."""
        self.used_at_s, self.served = now_s, max(self.served, served)

    def refuse(self, now_s: float, wanted_until_s: float) -> None:
        """Note that a request was refused for want of room; the key is taken to want more for so long."""
        self.refused_at_s, self.wanted_until_s = now_s, max(wanted_until_s, self.wanted_until_s)

    def enter(self, queued: AdmissionRequest) -> None:
        self.waiting[queued] = None
        self.waiting_tokens += queued.tokens
        self.waiting_uncached_tokens += queued.uncached_tokens

    def leave(self, queued: AdmissionRequest) -> None:
        del self.waiting[queued]
        self.waiting_tokens -= queued.tokens
        self.waiting_uncached_tokens -= queued.uncached_tokens

    def run(self, sign: int, tokens: int, choices: int) -> None:
        """Count a request into what is in flight (1), or out of it (-1)."""
        self.num_in_flight += sign
        self.in_flight_tokens += sign * tokens
        self.choices_in_flight += sign * choices

    def with_terms(self, tier: Tier, weight: float, tuning: AdmissionTuning) -> Tenant:
        """The tenant on a key's new terms: another one in another tier, as what waits keeps its place."""
        self.weight = weight
        if tier == self.tier:
            return self
        tenant = Tenant(self.name, tier, weight, tuning, keyed=self.keyed, lengths=self.lengths)
        tenant.refuse(self.refused_at_s, self.wanted_until_s)
        return tenant


_NOBODY: AbstractSet[Tenant] = frozenset()


class _TierQueue:
    """A tier's queue."""

    def __init__(self) -> None:
        self.tenants: dict[Tenant, None] = {}
        self.waiting: dict[AdmissionRequest, None] = {}
        self.last_served = self.credit = 0.0
        self.refused_at_s = -math.inf


class FairQueue:
    """All that waits, and every key in use lately. A request without a key belongs to its owner's."""

    def __init__(self, tuning: AdmissionTuning) -> None:
        self._tuning = tuning
        self.tokens = self.uncached_tokens = 0
        """Expected tokens of all that waits, and the tokens of their prompts that are to be computed."""
        self._levels = tuple(_TierQueue() for _ in TIERS)
        self._by_name: dict[str, Tenant] = {}
        self._active: dict[Tenant, None] = {}

    def __len__(self) -> int:
        return sum(len(level.waiting) for level in self._levels)

    def __bool__(self) -> bool:
        return any(level.waiting for level in self._levels)

    def __iter__(self) -> Iterator[AdmissionRequest]:
        for level in self._levels:
            yield from level.waiting

    @property
    def tenants(self) -> Collection[Tenant]:
        """The keys in use lately."""
        return self._by_name.values()

    @property
    def active_weight(self) -> float:
        """The sum of the weights of the keys that have a request waiting or running."""
        return sum(tenant.weight for tenant in self._active)

    def recent_weight(self, now_s: float, *, besides: Tenant) -> float:
        """The weights of the other keys that are active, or were so lately that they may be again."""
        recent_s = now_s - self._tuning.recent_s
        others = (tenant for tenant in self.tenants if tenant is not besides)
        return sum(tenant.weight for tenant in others if tenant.active or tenant.used_at_s > recent_s)

    def depth(self, rank: int) -> int:
        """Requests of a tier that wait."""
        return len(self._levels[rank].waiting)

    def waiting_tokens(self, rank: int) -> int:
        """Expected tokens of a tier's requests that wait."""
        return sum(queued.tokens for queued in self._levels[rank].waiting)

    def waited_s(self, rank: int, now_s: float) -> float:
        """Seconds that the oldest request of a tier has waited; 0 when there is none."""
        oldest = next(iter(self._levels[rank].waiting), None)
        return 0.0 if oldest is None else now_s - oldest.entered_s

    def touch(self, request: ChatRequest, key: Key | None, now_s: float, pool_tokens: int) -> Tenant:
        """The tenant of a new request, on its key's present terms, with no more credit than it may have."""
        name = request.owner if key is None else key.id
        tier: Tier = "standard" if key is None else key.terms.tier
        weight = 1.0 if key is None else key.terms.weight
        tenant = self._by_name.get(name)
        if tenant is None:
            tenant = Tenant(name, tier, weight, self._tuning, keyed=key is not None)
        elif (tenant.tier, tenant.weight) != (tier, weight):
            tenant = tenant.with_terms(tier, weight, self._tuning)
        self._by_name[name] = tenant
        floor = -math.inf
        if not tenant.waiting:
            credit_tokens = self._tuning.credit_pools * pool_tokens if now_s < tenant.wanted_until_s else 0.0
            level = self._levels[tenant.rank]
            floor = min((other.served for other in level.tenants), default=level.last_served)
            floor -= credit_tokens / tenant.weight
        tenant.touch(now_s, floor)
        return tenant

    def enter(self, queued: AdmissionRequest) -> None:
        tenant, level = queued.tenant, self._levels[queued.tenant.rank]
        tenant.enter(queued)
        level.waiting[queued] = level.tenants[tenant] = self._active[tenant] = None
        self.tokens += queued.tokens
        self.uncached_tokens += queued.uncached_tokens

    def remove(self, queued: AdmissionRequest) -> None:
        tenant, level = queued.tenant, self._levels[queued.tenant.rank]
        tenant.leave(queued)
        del level.waiting[queued]
        self.tokens -= queued.tokens
        self.uncached_tokens -= queued.uncached_tokens
        if not tenant.waiting:
            del level.tenants[tenant]
        if not level.waiting:
            level.credit = 0.0
        self._drop_if_idle(tenant)

    def begin(self, queued: AdmissionRequest, choices: int, now_s: float) -> None:
        """Count a request that is admitted, and not charged for it yet."""
        tenant = queued.tenant
        self._levels[tenant.rank].last_served = tenant.served
        waited_s = max(now_s - queued.entered_s, self.waited_s(tenant.rank, now_s))  # it has left the queue
        if self.is_wanted_above(tenant, now_s) and waited_s >= self._tuning.ageing_s[tenant.rank]:
            self._levels[tenant.rank].credit -= queued.tokens
        for lower in range(tenant.rank + 1, len(TIERS)):
            if self._aged(lower, now_s):
                level = self._levels[lower]
                level.credit = min(level.credit + self._tuning.aged_share * queued.tokens, queued.tokens)
        tenant.run(1, queued.tokens, choices)
        self._active[tenant] = None

    def end(self, queued: AdmissionRequest, choices: int) -> None:
        """Count out an admitted request that has ended."""
        queued.tenant.run(-1, queued.tokens, choices)
        self._drop_if_idle(queued.tenant)

    def in_order(self, now_s: float) -> Iterator[AdmissionRequest]:
        """The waiting requests, the next one first; the queue must not change meanwhile."""
        aged = [r for r in range(1, len(TIERS)) if self.has_turn(r, now_s)]
        for rank in (*reversed(aged), *(r for r in range(len(TIERS)) if r not in aged)):
            for tenant in sorted(self._levels[rank].tenants, key=_by_served):
                yield from islice(tenant.waiting, self._tuning.max_scanned_of_key)

    def has_turn(self, rank: int, now_s: float) -> bool:
        """True if a tier is aged, and goes before those above it."""
        return self._aged(rank, now_s) and self._levels[rank].credit >= 0

    def waits_up_to(self, rank: int) -> bool:
        """True if that tier or a higher one waits."""
        return any(level.waiting for level in self._levels[: rank + 1])

    def waiting_below(self, rank: int) -> set[Tenant]:
        """The keys of lower tiers with requests that wait."""
        return {tenant for level in self._levels[rank + 1 :] for tenant in level.tenants}

    def is_wanted_above(
        self, tenant: Tenant, now_s: float, passed: AbstractSet[Tenant] = frozenset()
    ) -> bool:
        """True if a higher tier waits, or was refused so lately that its clients may come back.

        The keys of `passed` do not count: room is not what they wait for.
        """
        lately_s, above = now_s - self._tuning.refused_s, self._levels[: tenant.rank]
        return any(level.refused_at_s > lately_s or level.tenants.keys() - passed for level in above)

    def note_refused(self, rank: int, now_s: float) -> None:
        """Note that a request of that tier was refused for want of room."""
        self._levels[rank].refused_at_s = now_s

    def overdue(self, deadlines_s: Sequence[float], now_s: float) -> list[AdmissionRequest]:
        """The requests that have waited for the deadline of their tier."""
        return [queued for queued in self if now_s - queued.entered_s >= deadlines_s[queued.tenant.rank]]

    def forget_idle(self, now_s: float) -> None:
        """Drop the keys that were not in use for long."""
        long_ago_s = now_s - self._tuning.forgotten_s
        for tenant in [t for t in self.tenants if t.used_at_s < long_ago_s and not t.active]:
            del self._by_name[tenant.name]

    def _drop_if_idle(self, tenant: Tenant) -> None:
        if not tenant.active:
            del self._active[tenant]

    def _aged(self, rank: int, now_s: float) -> bool:
        return self.depth(rank) > 0 and rank > 0 and self.waited_s(rank, now_s) >= self._tuning.ageing_s[rank]


def _by_served(tenant: Tenant) -> tuple[float, float]:
    return tenant.served, tenant.in_flight_tokens / tenant.weight
