"""The load shedder: which requests may wait, and what the others get.

A request may wait if it is expected to be admitted soon, and while its key takes no more of the queue than is
left free: one key alone fills half of it. The expected wait follows from fair shares: before the last waiting
request of a key is admitted, each other key is served as many tokens, by weight, unless it wants less. A
refusal has a retry slot: the time at which the key's waiting requests, with those that have earlier slots,
will have been served. A request that returns at its slot goes before new ones.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator

from app.admission.estimates import Throughput
from app.admission.queue import AdmissionRequest, FairQueue, Tenant
from app.admission.scheduler import AdmissionScheduler
from app.admission.tuning import AdmissionTuning
from app.core import TIERS, Tier
from app.errors import KeyOverloaded, Overloaded, ServingError
from app.settings import Settings

CODES = (KeyOverloaded.default_code, Overloaded.default_code, "queue_timeout")


class RetrySlots:
    """A key's retry slots: when its refused requests may return, as whole seconds of the clock."""

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
        """True if a slot of this request is due."""
        slots = self._by_fingerprint.get(fingerprint)
        return bool(slots and slots[0][0] <= now_s)

    def later(self, fingerprint: int, now_s: float) -> int | None:
        """The time of the first slot of this request that is not due."""
        return next((at_s for at_s, _ in self._by_fingerprint.get(fingerprint, ()) if at_s > now_s), None)

    def use(self, fingerprint: int, now_s: float) -> bool:
        """Use up a slot of this request that is due; False where there is none."""
        has_slot = self.has(fingerprint, now_s)
        if has_slot:
            self._drop(fingerprint, 1)
        return has_slot

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
        settings: Settings,
        queue: FairQueue,
        scheduler: AdmissionScheduler,
        throughput: Throughput,
        chance: Callable[[], float],
        tuning: AdmissionTuning,
    ) -> None:
        self.refused: dict[Tier, Counter[str]] = {tier: Counter(dict.fromkeys(CODES, 0)) for tier in TIERS}
        """Requests refused for want of room since the process began, by tier and code."""
        self.retry_slots = Counter({"kept": 0, "missed": 0})
        """Slots whose time is over, by what became of them."""
        self._degraded_refuses = False
        self._queue, self._scheduler, self._throughput = queue, scheduler, throughput
        self._chance, self._tuning = chance, tuning
        self.max_queued_requests, self._max_queued_tokens = (
            settings.max_queued_requests,
            settings.max_queued_tokens,
        )
        self._deadline_s = (settings.queue_interactive_s, settings.queue_standard_s, settings.queue_batch_s)
        self._max_expected_s = tuning.wait_of_ttft * settings.ttft_target_s
        """Bound on the expected wait, in tiers other than batch."""
        self._slots: dict[str, RetrySlots] = {}

    def degraded(self, *, refuses: bool) -> None:
        """Note whether degraded mode refuses: that rests on an observed pressure, and wins over a guess."""
        self._degraded_refuses = refuses

    def restart(self, throughput: Throughput) -> None:
        """Set the throughput in force from now on; existing slots keep their times."""
        self._throughput = throughput

    @property
    def max_queued_tokens(self) -> int:
        """Tokens that may wait."""
        return self._max_queued_tokens or int(
            self._tuning.queue_pools * self._scheduler.kv_pools.capacity_tokens
        )

    def slots_of(self, tenant: Tenant) -> RetrySlots:
        return self._slots.setdefault(tenant.name, RetrySlots(self._tuning.grace_s))

    def precheck(self, queued: AdmissionRequest, now_s: float) -> None:
        """Refuse what would have to be refused once it is rendered. Raises KeyOverloaded, Overloaded."""
        has_slot = self.slots_of(queued.tenant).has(queued.fingerprint, now_s)
        if not has_slot and not self._may_wait(queued, now_s):
            raise self._refusal(queued, now_s)

    def enter(self, queued: AdmissionRequest, now_s: float) -> None:
        """Let a request wait, and use up its slot. Raises KeyOverloaded, Overloaded."""
        has_slot = self.use_slot(queued, now_s)
        if not self._may_wait(queued, now_s, has_slot=has_slot):
            raise self._refusal(queued, now_s)

    def use_slot(self, queued: AdmissionRequest, now_s: float) -> bool:
        """Use up a due retry slot of a request; False where it has none."""
        has_slot = self.slots_of(queued.tenant).use(queued.fingerprint, now_s)
        self.retry_slots["kept"] += has_slot
        return has_slot

    def overdue(self, now_s: float) -> Iterator[tuple[AdmissionRequest, ServingError]]:
        """Requests that have waited for their whole deadline, and their refusals."""
        for queued in self._queue.overdue(self._deadline_s, now_s):
            waited_s = now_s - queued.entered_s
            why = f"The request waited {waited_s:.0f} s for room on this server, as long as its tier may."
            yield queued, self._refusal(queued, now_s, why, code="queue_timeout")

    def expire(self, now_s: float) -> None:
        """Drop the slots of requests that did not return."""
        for name, slots in list(self._slots.items()):
            self.retry_slots["missed"] += slots.expire(now_s)
            if not slots:
                del self._slots[name]

    def max_wait_s(self, tenant: Tenant) -> float:
        """Seconds that a key's next request may wait by expectation."""
        usable_s = self._tuning.usable_deadline * self._deadline_s[tenant.rank]
        return usable_s if tenant.tier == "batch" else min(usable_s, self._max_expected_s)

    def wait_s(self, tenant: Tenant, now_s: float) -> float:
        """Seconds that a key's next request would wait by expectation, if it is as its others are."""
        own = tenant.waiting_tokens + self.slots_of(tenant).due_tokens(now_s)
        ahead = self._ahead(tenant, own + tenant.mean_tokens, now_s)
        return (own + ahead) / self._rate(tenant)

    def is_too_old(self, queued: AdmissionRequest, *, has_slot: bool = False) -> bool:
        """True if a request lay in its socket for as long as it may wait at all, and the engine is half full.

        Its client may have given up, and it would delay others. An idle engine serves it
        without delaying any.
        """
        factor = self._tuning.slot_wait_factor if has_slot else 1.0
        return queued.age_s > self.max_wait_s(queued.tenant) * factor and self._scheduler.half_full

    def _may_wait(self, queued: AdmissionRequest, now_s: float, *, has_slot: bool = False) -> bool:
        tenant, queue = queued.tenant, self._queue
        free_tokens = self.max_queued_tokens - queue.tokens
        free_requests = self.max_queued_requests - len(queue)
        full = free_requests < 1 or (queued.tokens > free_tokens and queue.tokens)
        if full or self.is_too_old(queued, has_slot=has_slot):
            return False
        if not queue.waits_up_to(tenant.rank):
            return True  # it waits for what runs alone
        if self._scheduler.fits_beside_waiting(tenant, queued.tokens, queued.age_s, now_s):
            return True  # it waits for the prefill of others alone
        rate, until_end = self._rate(tenant), tenant.waiting_tokens + queued.tokens
        # Before throughput was measured the first requests are not refused: they wait up to their deadline.
        few = len(queue) < self._tuning.unmeasured_waiting
        unmeasured = few and not self._degraded_refuses and not self._throughput.is_measured
        if has_slot and not unmeasured:
            ahead = self._ahead(tenant, until_end)
            return until_end + ahead <= self._tuning.slot_wait_factor * self.max_wait_s(tenant) * rate
        if tenant.waiting and len(tenant.waiting) + 1 > free_requests:
            return False
        left_s = self.max_wait_s(tenant) - queued.age_s - self._scheduler.steady_after_s(now_s, rate)
        limit = free_tokens if unmeasured else min(free_tokens, max(left_s, 0.0) * rate)
        own = tenant.waiting_tokens + self.slots_of(tenant).due_tokens(now_s)
        return (
            tenant.waiting_tokens <= limit and own + self._ahead(tenant, own + queued.tokens, now_s) <= limit
        )

    def _ahead(self, tenant: Tenant, own: float, until_s: float = -math.inf) -> float:
        """Tokens of other keys that are served before `own` tokens of a key are.

        Requests count that wait, and that have a retry slot up to a time. Of a key of the same tier: as much
        as of this key, by weight, and what it was served less; ties are assumed lost.
        """
        ahead = 0.0
        for other in self._queue.tenants:
            slots = self._slots.get(other.name)
            if other is tenant or other.rank > tenant.rank or not (other.waiting or slots):
                continue
            tokens: float = other.waiting_tokens + (slots.due_tokens(until_s) if slots else 0)
            if other.rank == tenant.rank:
                less = max(tenant.served - other.served, 0.0)
                tokens = min(tokens, (less + own / tenant.weight) * other.weight)
            ahead += tokens
        return ahead

    def _rate(self, tenant: Tenant) -> float:
        """Tokens per second that its tier is served."""
        share = self._tuning.aged_share if self._queue.waits_up_to(tenant.rank - 1) else 1.0
        return self._throughput.tokens_per_s * share

    def _refusal(
        self, queued: AdmissionRequest, now_s: float, why: str = "", *, code: str = ""
    ) -> ServingError:
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
        wanted_s = retry_s + self._tuning.grace_s if sure else self._tuning.wanted_s
        tenant.refuse(now_s, now_s + wanted_s)
        if tenant not in self._scheduler.over_share:
            self._queue.note_refused(tenant.rank, now_s)
        when = f"Try again in {retry_s} s." if sure else "No capacity expected within two minutes."
        error = kind(
            f"{why} {when}",
            code=code,
            retry_after_s=retry_s,
            should_retry=None if sure else False,
        )
        self.refused[tenant.tier][error.code] += 1
        return error

    def _over_share(self, tenant: Tenant) -> bool:
        """True if others are here, and the key has more than its weight of all that waits and runs."""
        active = [other for other in self._queue.tenants if other.active]
        weight = sum(other.weight for other in active)
        tokens = sum(other.in_flight_tokens + other.waiting_tokens for other in active)
        own = tenant.in_flight_tokens + tenant.waiting_tokens
        return len(active) > 1 and tenant.active and own > tokens * tenant.weight / weight

    def _promise(self, queued: AdmissionRequest, now_s: float) -> tuple[int, bool]:
        """Seconds until a retry slot, and whether it is one: none is farther away than `max_retry_s`.

        A request that returns early gets the same time again: it has one slot.
        """
        tenant, tuning = queued.tenant, self._tuning
        slots, rate = self.slots_of(tenant), self._rate(tenant)
        at_s = slots.later(queued.fingerprint, now_s)
        if at_s is not None:
            return math.ceil(at_s - now_s), True
        free_tokens = max(self.max_queued_tokens - self._queue.tokens, 0)
        limit = min(free_tokens + tenant.waiting_tokens, self.max_wait_s(tenant) * rate)
        own = tenant.waiting_tokens + slots.tokens + queued.tokens
        served = own + self._ahead(tenant, own, math.inf)
        wait_s = max(served - tuning.return_at * limit, 0.0) / (tuning.slots_share * rate)
        wait_s *= 1 - tuning.jitter * self._chance()
        retry_s = max(math.ceil(wait_s + self._scheduler.steady_after_s(now_s, rate)), 1)
        if retry_s > tuning.max_retry_s:
            return math.ceil(tuning.max_retry_s * (1 - tuning.jitter * self._chance())), False
        slots.make(queued.fingerprint, now_s + retry_s, queued.tokens)
        return retry_s, True
