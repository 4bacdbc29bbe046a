"""The requests that are in the engine now: how many places they take, and for how long they have run."""

from __future__ import annotations

from itertools import islice

from app.admission.capacity import DecodeWindow, KVBudget, PrefillWindow
from app.admission.fair_queue import FairQueue, Tenant, Tenants
from app.admission.ticket import Ticket

YOUNG = 3.0
"""How many times their mean age requests are taken to run, at least."""


class InFlight:
    """What has been let in and not given back. Times are seconds of the same clock."""

    def __init__(self, window: DecodeWindow | None = None, shared: DecodeWindow | None = None) -> None:
        self.most_choices = 0
        """How many choices the engine runs at once; 0 where it does not say."""
        self.window = window or DecodeWindow()
        """How many of them keep the time per output token within its target."""
        self.shared_window = shared or DecodeWindow()
        """How many may run of a key that has more than its share, while others are about."""
        self.reclaimed_tokens = 0
        """Of those that were aborted so that others have room."""
        self._tickets: dict[str, Ticket] = {}
        self.num_choices = self._tokens = 0
        self._admitted_sum_s = 0.0

    def add(self, ticket: Ticket, now_s: float) -> None:
        """A request was let in."""
        ticket.admitted_s = now_s
        self._tickets[ticket.rid] = ticket
        self.num_choices += ticket.reservation.n
        self._tokens += ticket.tokens
        self._admitted_sum_s += now_s

    def remove(self, ticket: Ticket) -> None:
        """It has ended."""
        assert ticket.admitted_s is not None
        del self._tickets[ticket.rid]
        self.num_choices -= ticket.reservation.n
        self._tokens -= ticket.tokens
        self._admitted_sum_s -= ticket.admitted_s
        if ticket.reclaimed:
            self.reclaimed_tokens -= ticket.tokens

    def reclaim(self, rid: str) -> None:
        """It was aborted so that others have room; unknown ids are ignored."""
        ticket = self._tickets.get(rid)
        if ticket is not None and not ticket.reclaimed:
            ticket.reclaimed = True
            self.reclaimed_tokens += ticket.tokens

    @property
    def half_full(self) -> bool:
        """Whether half of the engine's places are taken, where it says how many it has."""
        return 0 < self.most_choices <= 2 * self.num_choices

    def has_place(self, n: int, spare: float, *, within: bool = False) -> bool:
        """Whether so many choices more would run at once, a part of the places kept; one request may.

        A key `within` its share of the decode window does not wait for that: what others hold of it
        beyond theirs is theirs to give back.
        """
        if not self.num_choices:
            return True
        choices, most = self.num_choices + n, self.most_choices
        if most and choices > most - int(spare * most):
            return False
        return within or self.window.has_place(choices, spare)

    def ends_after_s(self, now_s: float, tokens_per_s: float) -> float:
        """Until requests end as fast as they come, at this throughput: after a burst none has run for long.

        What is in flight over the throughput is how long they run (Little's law); in a steady flow
        they have run for half of that on average.
        """
        if not self._tickets:
            return 0.0
        age_s = now_s - self._admitted_sum_s / len(self._tickets)
        return max(self._tokens / tokens_per_s - YOUNG * age_s, 0.0)


SPARE = 0.125
"""Part of the pool kept for keys that use less than their share of it: they need not wait for room."""
BYPASS = 1.0
"""What others of its key, or of lower tiers, may take past a request that does not fit, in its own tokens."""
HARD_BYPASS = 16.0
"""The same for all others; from then on everything waits until it fits."""
FEW = 2
"""Requests that wait of a key that is not taken to have a backlog."""
ABOVE_SHARE = 1.25
"""A key has more than its share of what runs from so many times its share on: keys take turns one by one."""
SCANNED = 48
"""Requests looked at for one that fits."""


class AdmissionScheduler:
    """What there is room for, of what waits and of what comes."""

    def __init__(
        self,
        queue: FairQueue,
        prefill_window: PrefillWindow,
        tenants: Tenants,
        window: DecodeWindow | None = None,
        shared: DecodeWindow | None = None,
    ) -> None:
        self.prefill_window = prefill_window
        self.kv_budget = KVBudget(0)
        self.in_flight = InFlight(window, shared)
        self.waiting_uncached_tokens = 0
        """Prompt tokens of those that wait."""
        self._queue = queue
        self._tenants = tenants
        self._blocked: Ticket | None = None
        self._held_back: set[Tenant] = set()
        """Keys that would slow the others' answers too much, as of the last look."""

    @property
    def blocked(self) -> Ticket | None:
        """Whose turn it was when there was no room for it, while it waits."""
        blocked = self._blocked
        return blocked if blocked is not None and blocked in blocked.tenant.waiting else None

    def next(self, now_s: float) -> Ticket | None:
        """The first in turn that fits. One that does not is passed by others for a while only."""
        blocked: list[Ticket] = []
        self._held_back.clear()
        for ticket in islice(
            self._queue.in_turn(now_s), SCANNED if self.in_flight.has_place(1, 0.0, within=True) else 1
        ):
            assert isinstance(ticket, Ticket)
            if self._slows_others(ticket.tenant, ticket.reservation.n, now_s):
                self._held_back.add(ticket.tenant)  # nobody waits for what has more than its share
                continue
            if all(self._may_pass(ticket, other) for other in blocked) and self.fits(ticket, now_s):
                self._blocked = blocked[0] if blocked else None
                if not self.prefill_window.has_room(ticket.uncached_tokens):
                    return None
                for passed in blocked:
                    passed.bypassed_tokens += ticket.tokens
                return ticket
            blocked.append(ticket)
            if ticket.bypassed_tokens >= HARD_BYPASS * ticket.tokens:
                break
        self._blocked = blocked[0] if blocked else None
        return None

    def fits(self, ticket: Ticket, now_s: float) -> bool:
        """Whether the engine has a place and the pool has room, without what is kept for others."""
        spare = self._spare(ticket.tenant, ticket.tokens)
        n = ticket.reservation.n
        if self._slows_others(ticket.tenant, n, now_s):
            return False
        if not self.in_flight.has_place(n, spare, within=self._within(ticket.tenant, n)):
            return False
        return self.kv_budget.fits(ticket.reservation, int(spare * self.kv_budget.capacity_tokens))

    @property
    def half_full(self) -> bool:
        """Whether half of the memory or of the places is taken."""
        return 2 * self.kv_budget.committed_tokens >= self.kv_budget.limit_tokens or self.in_flight.half_full

    def ends_after_s(self, now_s: float, tokens_per_s: float) -> float:
        """Until requests end as fast as they come, at that throughput."""
        return self.in_flight.ends_after_s(now_s, tokens_per_s)

    def free_tokens(self, tenant: Tenant, age_s: float) -> int:
        """Memory that nothing is kept for, less what waits before a key that comes.

        What waits of a key that is held back does not count. None without a place in the engine, or before
        a long prefill.
        """
        passed = [other for other in self._held_back if other is not tenant]
        waiting = len(self._queue) - sum(len(other.waiting) for other in passed)
        if not self.in_flight.has_place(waiting + 1, SPARE):
            return 0
        uncached = self.waiting_uncached_tokens - sum(_uncached_tokens(other) for other in passed)
        if uncached > self.prefill_window.soon_tokens(age_s):
            return 0
        budget = self.kv_budget
        line_tokens = self._queue.tokens - sum(other.waiting_tokens for other in passed)
        free_tokens = budget.limit_tokens - int(SPARE * budget.capacity_tokens) - budget.committed_tokens
        return free_tokens - line_tokens

    def has_room(self, tenant: Tenant, tokens: int, age_s: float, now_s: float) -> bool:
        """Whether a request of so many tokens fits now, past the one that does not and for which all wait.

        A key within its share has what is kept for such. It passes another that was served no less, or asks
        for little.
        """
        blocked = self.blocked
        n = len(tenant.waiting) + 1
        if blocked is None or self._slows_others(tenant, n, now_s):
            return False
        if blocked.tenant is tenant:
            passed = blocked.tokens
            if blocked.bypassed_tokens >= BYPASS * blocked.tokens:
                return False
        else:
            passed = blocked.tenant.waiting_tokens
            theirs = blocked.tenant.served + blocked.tokens / blocked.tenant.weight
            more = tenant.served + (tenant.waiting_tokens + tokens) / tenant.weight > theirs
            if more and not self._asks_little(tenant, tenant.waiting_tokens + tokens, n):
                return False
        spare = self._spare(tenant, tenant.waiting_tokens + tokens)
        if not self.in_flight.has_place(n, spare, within=self._within(tenant, n)):
            return False
        if self.waiting_uncached_tokens - passed > self.prefill_window.soon_tokens(age_s):
            return False
        room = (
            self.kv_budget.limit_tokens
            - int(spare * self.kv_budget.capacity_tokens)
            - self.kv_budget.committed_tokens
        )
        return self._queue.tokens - passed + tokens <= room

    def _spare(self, tenant: Tenant, tokens: int) -> float:
        """What part of everything is kept from a key that would have so many tokens more."""
        alone = len(self._tenants) == 1 and not tenant.keyed
        return 0.0 if alone or self._entitled(tenant, tokens) else SPARE

    def _entitled(self, tenant: Tenant, tokens: int) -> bool:
        """Whether a key has nothing in flight, or stays within its share, were one more key to come."""
        own = tenant.in_flight_tokens + tokens
        return (
            not tenant.num_in_flight or own <= self._share(tenant, others=1) * self.kv_budget.capacity_tokens
        )

    def _within(self, tenant: Tenant, n: int) -> bool:
        """Whether a key stays within its share of the decode window with so many choices more."""
        return tenant.choices_in_flight + n <= self._share(tenant) * self.in_flight.window.most_choices

    def _slows_others(self, tenant: Tenant, n: int, now_s: float) -> bool:
        """Whether a key that has more than its share of what runs would slow the others' answers too much."""
        running = self.in_flight.num_choices + n
        if n == running == 1 or self.in_flight.shared_window.has_place(running, 0.0):
            return False
        others_weight = self._tenants.recent_weight(now_s, besides=tenant)
        share = tenant.weight / (tenant.weight + others_weight)
        return others_weight > 0 and tenant.choices_in_flight + n > ABOVE_SHARE * share * running

    def _share(self, tenant: Tenant, *, others: int = 0) -> float:
        """What part of everything is a key's, among those that are active and so many more."""
        return tenant.weight / (
            self._tenants.active_weight + others + (0 if tenant.active else tenant.weight)
        )

    def _may_pass(self, ticket: Ticket, blocked: Ticket) -> bool:
        """Whether a request may go before one whose turn it is, and that does not fit.

        Of the same key, or a lower tier: for a while. Of another key: as long as that is not served more
        by it than one such request, or takes next to nothing and has no backlog.
        """
        tenant, other = ticket.tenant, blocked.tenant
        if tenant is other or tenant.rank > other.rank:
            return blocked.bypassed_tokens < BYPASS * blocked.tokens
        own, theirs = ticket.tokens / tenant.weight, blocked.tokens / other.weight
        if tenant.rank < other.rank or tenant.served + own <= other.served + theirs:
            return True
        return self._asks_little(tenant, ticket.tokens, len(tenant.waiting))

    def _asks_little(self, tenant: Tenant, tokens: int, waiting: int) -> bool:
        """Whether so many tokens more are next to nothing, and so many that wait are no backlog."""
        little = SPARE / 2 * self.kv_budget.capacity_tokens
        return waiting <= FEW and tenant.in_flight_tokens + tokens <= little


def _uncached_tokens(tenant: Tenant) -> int:
    return sum(ticket.uncached_tokens for ticket in tenant.waiting if isinstance(ticket, Ticket))
