"""Who may wait, and what a client gets that may not.

A request may wait if it is expected to have its turn soon, and while its key takes no more of the queue than
is left free: one key alone fills half of it. The turn follows from fair shares: in front of the end of a
key's line, each other key is served as many tokens, by weight, unless it wants less. A refusal has a retry
slot: the time at which the key's line, with the slots promised earlier, will have moved on so far. A request
that comes back at its time goes in front of those that come for the first time.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from app.admission.estimates import Throughput
from app.admission.fair_queue import FairQueue, Queued, Tenant
from app.admission.scheduler import AdmissionScheduler
from app.admission.tuning import AdmissionTuning
from app.core import TIERS, Tier
from app.errors import KeyOverloaded, Overloaded, ServingError
from app.settings import Settings

CODES = (KeyOverloaded.default_code, Overloaded.default_code, "queue_timeout")


@dataclass(frozen=True, slots=True)
class QueueBounds:
    """What may wait, and how long. Times in seconds; 0 queued tokens stands for some pools (AdmissionTuning).

    `soon_s` is what waiting may take by expectation, in tiers other than batch.
    """

    max_queued_requests: int = 2048
    max_queued_tokens: int = 0
    deadline_s: Mapping[Tier, float] = field(
        default_factory=lambda: {"interactive": 5.0, "standard": 10.0, "batch": 300.0}
    )
    soon_s: float = math.inf

    @classmethod
    def of(cls, settings: Settings, tuning: AdmissionTuning) -> QueueBounds:
        """The bounds of the settings."""
        deadline_s: Mapping[Tier, float] = {
            "interactive": settings.queue_interactive_s,
            "standard": settings.queue_standard_s,
            "batch": settings.queue_batch_s,
        }
        soon_s = tuning.wait_of_ttft * settings.ttft_target_s
        return cls(settings.max_queued_requests, settings.max_queued_tokens, deadline_s, soon_s)


class RetrySlots:
    """A key's retry slots: when its refused requests may come back, as whole seconds of the clock."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._by_fingerprint: dict[int, list[tuple[int, int]]] = {}
        self._due: Counter[int] = Counter()
        self.tokens = 0
        """Expected tokens of all of them."""

    def __bool__(self) -> bool:
        return bool(self._by_fingerprint)

    def make(self, fingerprint: int, at_s: float, tokens: int) -> None:
        """Expect a request."""
        insort(self._by_fingerprint.setdefault(fingerprint, []), (math.floor(at_s), tokens))
        self._count(math.floor(at_s), tokens)

    def has(self, fingerprint: int, now_s: float) -> bool:
        """Whether the time of a slot of this request has come."""
        slots = self._by_fingerprint.get(fingerprint)
        return bool(slots and slots[0][0] <= now_s)

    def later(self, fingerprint: int, now_s: float) -> int | None:
        """The time of the first slot of this request that has not come."""
        return next((at_s for at_s, _ in self._by_fingerprint.get(fingerprint, ()) if at_s > now_s), None)

    def keep(self, fingerprint: int, now_s: float) -> bool:
        """Whether the request comes to a slot, which it uses up; not if it comes early."""
        kept = self.has(fingerprint, now_s)
        if kept:
            self._drop(fingerprint, 1)
        return kept

    def expire(self, now_s: float) -> int:
        """Drop the slots whose time is over; returns how many."""
        over_s = now_s - self._grace_s
        if not self._due or min(self._due) >= over_s:
            return 0
        late = {f: sum(at_s < over_s for at_s, _ in slots) for f, slots in self._by_fingerprint.items()}
        for fingerprint, num in late.items():
            self._drop(fingerprint, num)
        return sum(late.values())

    def due_tokens(self, until_s: float) -> int:
        """Expected tokens of the slots up to a time."""
        if math.isinf(until_s):
            return self.tokens if until_s > 0 else 0
        return sum(tokens for at_s, tokens in self._due.items() if at_s <= until_s)

    def _drop(self, fingerprint: int, num: int) -> None:
        slots = self._by_fingerprint[fingerprint]
        for at_s, tokens in slots[:num]:
            self._count(at_s, -tokens)
        del slots[:num]
        if not slots:
            del self._by_fingerprint[fingerprint]

    def _count(self, at_s: int, tokens: int) -> None:
        self.tokens += tokens
        self._due[at_s] += tokens
        if not self._due[at_s]:
            del self._due[at_s]


class LoadShedder:
    """The bounds of the queue, and the refusals. `chance` draws a number from 0 to 1 for each retry slot."""

    def __init__(
        self,
        bounds: QueueBounds,
        queue: FairQueue,
        scheduler: AdmissionScheduler,
        throughput: Throughput,
        chance: Callable[[], float],
        tuning: AdmissionTuning,
    ) -> None:
        self.refused: dict[Tier, Counter[str]] = {tier: Counter(dict.fromkeys(CODES, 0)) for tier in TIERS}
        """Requests refused for want of room since the process began, by tier and code."""
        self.retry_slots = Counter({"kept": 0, "missed": 0})
        """What became of the slots whose time is over."""
        self._degraded_refuses = False
        self.bounds, self._queue, self._scheduler, self._throughput = bounds, queue, scheduler, throughput
        self._chance, self._tuning = chance, tuning
        self._deadline_s = tuple(bounds.deadline_s[tier] for tier in TIERS)
        self._slots: dict[str, RetrySlots] = {}

    def degraded(self, *, refuses: bool) -> None:
        """Note whether degraded mode refuses: that rests on an observed pressure, and wins over a guess."""
        self._degraded_refuses = refuses

    def restart(self, throughput: Throughput) -> None:
        """Go by this throughput from now on; what was promised stays promised."""
        self._throughput = throughput

    @property
    def max_queued_tokens(self) -> int:
        """Tokens that may wait."""
        return self.bounds.max_queued_tokens or int(
            self._tuning.queue_pools * self._scheduler.kv_budget.capacity_tokens
        )

    def slots_of(self, tenant: Tenant) -> RetrySlots:
        """The retry slots of a key."""
        return self._slots.setdefault(tenant.name, RetrySlots(self._tuning.grace_s))

    def precheck(self, queued: Queued, now_s: float) -> None:
        """Refuse what would have to be refused once it is rendered. Raises KeyOverloaded, Overloaded."""
        returns = self.slots_of(queued.tenant).has(queued.fingerprint, now_s)
        if not returns and not self._may_wait(queued, now_s, returns=False):
            raise self._refusal(queued, now_s)

    def enter(self, queued: Queued, now_s: float) -> None:
        """Let a request wait. Raises KeyOverloaded, Overloaded."""
        if not self._may_wait(queued, now_s, returns=self.returns(queued, now_s)):
            raise self._refusal(queued, now_s)

    def returns(self, queued: Queued, now_s: float) -> bool:
        """Whether a request comes to its retry slot, which it uses up."""
        kept = self.slots_of(queued.tenant).keep(queued.fingerprint, now_s)
        self.retry_slots["kept"] += kept
        return kept

    def overdue(self, now_s: float) -> Iterator[tuple[Queued, ServingError]]:
        """The requests that have waited for their whole deadline, and their refusals."""
        for queued in self._queue.overdue(self._deadline_s, now_s):
            waited_s = now_s - queued.entered_s
            why = f"The request waited {waited_s:.0f} s for room on this server, as long as its tier may."
            yield queued, self._refusal(queued, now_s, why, code="queue_timeout")

    def expire(self, now_s: float) -> None:
        """Give up on those who have not come back."""
        for name, slots in list(self._slots.items()):
            self.retry_slots["missed"] += slots.expire(now_s)
            if not slots:
                del self._slots[name]

    def max_wait_s(self, tenant: Tenant) -> float:
        """Seconds that a key's next request may wait by expectation."""
        usable_s = self._tuning.usable_deadline * self._deadline_s[tenant.rank]
        return usable_s if tenant.tier == "batch" else min(usable_s, self.bounds.soon_s)

    def wait_s(self, tenant: Tenant, now_s: float) -> float:
        """Seconds that a key's next request would wait by expectation, if it is as its others are."""
        line = tenant.waiting_tokens + self.slots_of(tenant).due_tokens(now_s)
        ahead = self._ahead(tenant, line + tenant.mean_tokens, now_s)
        return (line + ahead) / self._rate(tenant)

    def too_old(self, queued: Queued, *, returns: bool = False) -> bool:
        """Whether a request lay in its socket for as long as it may wait at all.

        Its client waits in vain then, and it would keep others waiting. It is let in all the same where the
        engine has little to do: a server that is always late is still a server.
        """
        late = self._tuning.late if returns else 1.0
        return queued.age_s > self.max_wait_s(queued.tenant) * late and self._scheduler.half_full

    def _may_wait(self, queued: Queued, now_s: float, *, returns: bool) -> bool:
        tenant, queue = queued.tenant, self._queue
        free_tokens = self.max_queued_tokens - queue.tokens
        free_requests = self.bounds.max_queued_requests - len(queue)
        full = free_requests < 1 or (queued.tokens > free_tokens and queue.tokens)
        if full or self.too_old(queued, returns=returns):
            return False
        if not queue or self._scheduler.has_room(tenant, queued.tokens, queued.age_s, now_s):
            return True  # it waits for the prefill of others alone
        rate, line = self._rate(tenant), tenant.waiting_tokens + queued.tokens
        # Before throughput was measured the first requests are not refused: they wait up to their deadline.
        few = len(queue) < self._tuning.unmeasured_waiting
        unmeasured = few and not self._degraded_refuses and not self._throughput.is_measured
        if returns and not unmeasured:
            return line + self._ahead(tenant, line) <= self._tuning.late * self.max_wait_s(tenant) * rate
        if tenant.waiting and len(tenant.waiting) + 1 > free_requests:
            return False
        left_s = self.max_wait_s(tenant) - queued.age_s - self._scheduler.ends_after_s(now_s, rate)
        limit = free_tokens if unmeasured else min(free_tokens, max(left_s, 0.0) * rate)
        own = tenant.waiting_tokens + self.slots_of(tenant).due_tokens(now_s)
        return (
            tenant.waiting_tokens <= limit and own + self._ahead(tenant, own + queued.tokens, now_s) <= limit
        )

    def _ahead(self, tenant: Tenant, line: float, until_s: float = -math.inf) -> float:
        """Tokens of other keys that are served in front of the end of a key's line, both in tokens.

        Those count that wait, and those with a retry slot up to a time. Of a key of the same tier: as much as
        of this key, by weight, and what it was served less; nobody counts on going first.
        """
        ahead = 0.0
        for other in self._queue.tenants:
            slots = self._slots.get(other.name)
            if other is tenant or other.rank > tenant.rank or not (other.waiting or slots):
                continue
            others_line: float = other.waiting_tokens + (slots.due_tokens(until_s) if slots else 0)
            if other.rank == tenant.rank:
                less = max(tenant.served - other.served, 0.0)
                others_line = min(others_line, (less + line / tenant.weight) * other.weight)
            ahead += others_line
        return ahead

    def _rate(self, tenant: Tenant) -> float:
        """Tokens per second that its tier moves on by."""
        share = self._tuning.aged_share if self._queue.waits_above(tenant) else 1.0
        return self._throughput.tokens_per_s * share

    def _refusal(self, queued: Queued, now_s: float, why: str = "", *, code: str = "") -> ServingError:
        tenant = queued.tenant
        kind: type[Overloaded | KeyOverloaded] = Overloaded
        if not why and self._over_share(tenant):
            kind = KeyOverloaded
            why = (
                f"This key has more than its share of this server (requests running: {tenant.num_in_flight},"
                f" waiting: {len(tenant.waiting)})."
            )
        why = why or f"The server is full (requests waiting: {len(self._queue)})."
        retry_s, sure = self._promise(queued, now_s)
        tenant.refuse(now_s, now_s + (retry_s + self._tuning.grace_s if sure else self._tuning.wanted_s))
        when = f"Try again in {retry_s} s." if sure else "It is not sure to find room within two minutes."
        error = kind(
            f"{why} {when}",
            code=code,
            retry_after_s=retry_s,
            should_retry=None if sure else False,
        )
        self.refused[tenant.tier][error.code] += 1
        return error

    def _over_share(self, tenant: Tenant) -> bool:
        """Whether others are here, and the key has more than its weight of all that waits and runs."""
        active = [other for other in self._queue.tenants if other.active]
        weight = sum(other.weight for other in active)
        tokens = sum(other.in_flight_tokens + other.waiting_tokens for other in active)
        own = tenant.in_flight_tokens + tenant.waiting_tokens
        return len(active) > 1 and tenant.active and own > tokens * tenant.weight / weight

    def _promise(self, queued: Queued, now_s: float) -> tuple[int, bool]:
        """Seconds until a retry slot, and whether it is one: none is farther away than `max_retry_s`.

        A request that comes early is told the same time again: it has one slot.
        """
        tenant, tuning = queued.tenant, self._tuning
        slots, rate = self.slots_of(tenant), self._rate(tenant)
        at_s = slots.later(queued.fingerprint, now_s)
        if at_s is not None:
            return math.ceil(at_s - now_s), True
        free_tokens = max(self.max_queued_tokens - self._queue.tokens, 0)
        limit = min(free_tokens + tenant.waiting_tokens, self.max_wait_s(tenant) * rate)
        line = tenant.waiting_tokens + slots.tokens + queued.tokens
        ahead = line + self._ahead(tenant, line, math.inf)
        wait_s = max(ahead - tuning.return_at * limit, 0.0) / (tuning.promised * rate)
        wait_s *= 1 - tuning.jitter * self._chance()
        retry_s = max(math.ceil(wait_s + self._scheduler.ends_after_s(now_s, rate)), 1)
        if retry_s > tuning.max_retry_s:
            return math.ceil(tuning.max_retry_s * (1 - tuning.jitter * self._chance())), False
        slots.make(queued.fingerprint, now_s + retry_s, queued.tokens)
        return retry_s, True
