"""The choice of the next request: the order of the fair queue against the capacity of the engine.

One question is asked of a request, `obstacle`: what it has to wait for. One that does not fit is a blocked
head of line, which others may pass for a while only.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Sequence
from itertools import islice

from app.admission.budget import KVPools
from app.admission.queue import FairQueue, Tenant
from app.admission.ticket import Ticket
from app.admission.tuning import AdmissionTuning
from app.admission.windows import DecodeWindow, PrefillWindow


class Obstacle(enum.Enum):
    """A reason for which a request has to wait."""

    SHARE = "its key has more than its share of what runs, and would slow the others' answers too much"
    ORDER = "a request before it does not fit, and may not be passed"
    CHOICES = "the engine runs as many choices as it can"
    DECODE = "the decode window is full"
    MEMORY = "no pool has room"
    PREFILL = "the prefill window is full"


class AdmissionScheduler:
    """The requests in the engine, and the room for more.

    `window` is the decode window of all, `key_window` that of a key that has more than its share of what
    runs.
    """

    def __init__(
        self,
        queue: FairQueue,
        prefill_window: PrefillWindow,
        window: DecodeWindow,
        key_window: DecodeWindow,
        tuning: AdmissionTuning,
    ) -> None:
        self.kv_pools = KVPools(tuning)
        self.prefill_window, self.window, self.key_window = prefill_window, window, key_window
        self.num_choices = 0
        """Choices in the engine."""
        self._queue, self._tuning = queue, tuning
        self._max_choices = 0
        self._ended_s = -math.inf
        """When the engine last had something to run."""
        self._running: dict[str, Ticket] = {}
        self._blocked: Ticket | None = None
        self.over_share: set[Tenant] = set()
        """Keys with the obstacle SHARE, as of the last look: what others leave free is of no use to them."""

    # What is in the engine

    def restart(self, capacity_tokens: int, replicas: int = 1) -> None:
        """Begin with an engine that has just started; what it had before is given back as it ends."""
        self.kv_pools.restart(capacity_tokens, replicas)
        for window in (self.prefill_window, self.window, self.key_window):
            window.reset()

    def limit_choices(self, max_choices: int) -> None:
        """Set the number of choices that the engine runs at once; 0 where it does not say."""
        self._max_choices = max_choices

    def measure_uncached(self, ticket: Ticket) -> None:
        """Set how much of a request's prompt no other request in flight has."""
        spare = self._spare(ticket.tenant, ticket.tokens)
        unshared_tokens = self.kv_pools.unshared_tokens(ticket.allocation, spare)
        ticket.set_claim(unshared_tokens, self.kv_pools.pool_tokens)

    def begin(self, ticket: Ticket, now_s: float) -> None:
        """Admit a request."""
        spare = self._spare(ticket.tenant, ticket.tokens)
        self._queue.begin(ticket, ticket.allocation.n, now_s)
        self.kv_pools.take(ticket.allocation, spare)
        self._running[ticket.rid] = ticket
        self.num_choices += ticket.allocation.n
        if not self.key_window.fits(self.num_choices):
            self.key_window.mark_full()
        ticket.admit(now_s, queued_behind=self.prefill_window.enter(ticket.uncached_tokens, now_s))

    def end(self, ticket: Ticket, now_s: float) -> None:
        """Take back the room of an admitted request."""
        self._ended_s = now_s
        if not ticket.started:
            self.prefill_window.leave(ticket.uncached_tokens)
        self.kv_pools.give_back(ticket.allocation)
        self._queue.end(ticket, ticket.allocation.n)
        del self._running[ticket.rid]
        self.num_choices -= ticket.allocation.n

    def reclaim(self, rid: str) -> None:
        """Note that a request was aborted so that others have room; unknown ids are ignored."""
        if rid in self._running:
            self._running[rid].reclaim()

    def started(self, ticket: Ticket, uncached_tokens: int, now_s: float) -> None:
        """Note a request's first token, and that the engine has computed so many tokens of the prompt."""
        assert ticket.admitted_s is not None
        self.prefill_window.started(
            ticket.uncached_tokens, ticket.admitted_s, now_s, queued_behind=ticket.queued_behind
        )
        ticket.start(uncached_tokens)

    def observe_decode(self, ticket: Ticket, tokens: int, now_s: float) -> None:
        """Note that the first choice of a request has so many tokens."""
        new_tokens, took_s = ticket.since_last(tokens, now_s)
        if new_tokens > 0:
            for window in (self.window, self.key_window):
                window.observe_decode(new_tokens, took_s, self.num_choices, now_s)

    @property
    def reclaimed_tokens(self) -> int:
        """Tokens of the requests that were aborted so that others have room, and have not ended yet."""
        return sum(ticket.tokens for ticket in self._running.values() if ticket.reclaimed)

    @property
    def half_full(self) -> bool:
        """True if half of the memory or of the engine's places is taken."""
        memory = 2 * self.kv_pools.committed_tokens >= self.kv_pools.limit_tokens
        return memory or 0 < self._max_choices <= 2 * self.num_choices

    def steady_after_s(self, now_s: float, tokens_per_s: float) -> float:
        """Seconds until as many requests end as arrive, at that throughput.

        After a burst these are many: all its requests are young.
        The tokens in flight over the throughput is how long requests run (Little's law). In a steady flow
        they have run for half of that on average.
        """
        if not self._running:
            return 0.0
        tickets = self._running.values()
        age_s = now_s - sum(ticket.admitted_s or 0.0 for ticket in tickets) / len(tickets)
        return max(
            sum(ticket.tokens for ticket in tickets) / tokens_per_s - self._tuning.min_run_ages * age_s, 0.0
        )

    # Which request is next

    @property
    def blocked(self) -> Ticket | None:
        """The first request in order that did not fit at the last look, while it waits."""
        blocked = self._blocked
        return blocked if blocked is not None and blocked in blocked.tenant.waiting else None

    def next(self, now_s: float) -> Ticket | None:
        """The first request in order without an obstacle; those that it passes count its tokens."""
        blocked: list[Ticket] = []
        self.over_share.clear()
        self._blocked = None
        scanned = self._tuning.max_scanned if self._has_choices(1) else 1
        for ticket in islice(self._queue.in_order(now_s), scanned):
            assert isinstance(ticket, Ticket)
            obstacle = self.obstacle(ticket, now_s, blocked)
            if obstacle is Obstacle.SHARE:
                self.key_window.mark_full()
                self.over_share.add(ticket.tenant)  # a key above its share blocks no other
                continue
            if obstacle is None:
                for passed in blocked:
                    passed.record_bypass(ticket.tokens)
                return ticket
            if obstacle is Obstacle.PREFILL:
                self.prefill_window.mark_full()
                return None
            if obstacle is Obstacle.DECODE:
                self.window.mark_full()
            blocked.append(ticket)
            self._blocked = blocked[0]
            if ticket.bypassed_tokens >= self._tuning.hard_bypass * ticket.tokens:
                break
        return None

    def obstacle(self, ticket: Ticket, now_s: float, blocked: Sequence[Ticket] = ()) -> Obstacle | None:
        """The reason why a request waits behind those `blocked`; None if it may be admitted now."""
        tenant, n = ticket.tenant, ticket.allocation.n
        if self._slows_others(tenant, n, now_s):
            return Obstacle.SHARE
        if not all(self._may_pass(tenant, ticket.tokens, len(tenant.waiting), other) for other in blocked):
            return Obstacle.ORDER
        spare = self._kept(tenant, ticket.tokens, now_s)
        if not self._has_choices(n, spare):
            return Obstacle.CHOICES
        if not self._has_decode_room(tenant, n, spare):
            return Obstacle.DECODE
        if not self.kv_pools.fits(ticket.allocation, spare):
            return Obstacle.MEMORY
        return None if self.prefill_window.fits(ticket.uncached_tokens) else Obstacle.PREFILL

    def fits_beside_waiting(self, tenant: Tenant, tokens: int, age_s: float, now_s: float) -> bool:
        """True if a key's next request, of so many tokens, fits beside what waits before it."""
        return self._fits_at_end(tenant, tokens, age_s, now_s) or self._fits_past(
            tenant, tokens, age_s, now_s
        )

    def _fits_at_end(self, tenant: Tenant, tokens: int, age_s: float, now_s: float) -> bool:
        """True if it fits behind all that waits, but for keys above their share and lower tiers."""
        passed = (self.over_share | self._queue.waiting_below(tenant.rank)) - {tenant}
        n = len(self._queue) - sum(len(other.waiting) for other in passed) + 1
        passed_tokens = sum(other.waiting_tokens for other in passed)
        passed_uncached = sum(other.waiting_uncached_tokens for other in passed)
        spare = max(self._tuning.spare_share, self._kept(tenant, tokens, now_s))
        decodes = not self.num_choices or self.window.fits(self.num_choices + n, spare)
        return decodes and self._has_queue_room(n, tokens - passed_tokens, passed_uncached, spare, age_s)

    def _fits_past(self, tenant: Tenant, tokens: int, age_s: float, now_s: float) -> bool:
        """True if it may pass the blocked request, and fits beside what then waits before it.

        It may use the room kept for keys within their share, as far as its key is.
        """
        blocked, n, own_tokens = self.blocked, len(tenant.waiting) + 1, tenant.waiting_tokens + tokens
        if blocked is None or self._slows_others(tenant, n, now_s):
            return False
        if not self._may_pass(tenant, own_tokens, n, blocked):
            return False
        is_own = blocked.tenant is tenant
        passed_tokens = blocked.tokens if is_own else blocked.tenant.waiting_tokens
        passed_uncached = blocked.uncached_tokens if is_own else blocked.tenant.waiting_uncached_tokens
        spare = self._kept(tenant, own_tokens, now_s)
        return self._has_decode_room(tenant, n, spare) and self._has_queue_room(
            n, tokens - passed_tokens, passed_uncached, spare, age_s
        )

    def _has_queue_room(self, n: int, tokens: int, passed_uncached: int, spare: float, age_s: float) -> bool:
        """True if there is room for all that waits and so many choices and tokens more."""
        return (
            self._has_choices(n, spare)
            and self._queue.uncached_tokens - passed_uncached <= self.prefill_window.queueable_tokens(age_s)
            and self._queue.tokens + tokens <= self.kv_pools.free_tokens(spare)
        )

    def _has_choices(self, n: int, spare: float = 0.0) -> bool:
        """True if the engine runs so many choices more, a share of them kept; one request may always run."""
        limit = self._max_choices
        return not (limit and self.num_choices) or self.num_choices + n <= limit - int(spare * limit)

    def _has_decode_room(self, tenant: Tenant, n: int, spare: float) -> bool:
        """True if the decode window has room for so many choices more of a key.

        If a key is within its share of the window, it does not wait, although other keys hold more than
        theirs.
        """
        within = tenant.choices_in_flight + n <= self._share(tenant) * self.window.max_choices
        within = within and spare < self._tuning.kept_for_higher
        return not self.num_choices or within or self.window.fits(self.num_choices + n, spare)

    def _may_pass(self, tenant: Tenant, tokens: int, num_waiting: int, blocked: Ticket) -> bool:
        """True if so many tokens of a key may be admitted before a blocked request.

        A request of the same key or of a lower tier may be passed by a bounded number of tokens. One of
        another key may be passed while this key has been served no more than that key would be with it, or
        where this key asks for next to nothing and has no backlog.
        """
        tuning, other = self._tuning, blocked.tenant
        if tenant is other or tenant.rank > other.rank:
            return blocked.bypassed_tokens < tuning.bypass * blocked.tokens
        own, theirs = tokens / tenant.weight, blocked.tokens / other.weight
        if tenant.rank < other.rank or tenant.served + own <= other.served + theirs:
            return True
        little = tuning.spare_share / 2 * self.kv_pools.capacity_tokens
        return num_waiting <= tuning.few_waiting and tenant.in_flight_tokens + tokens <= little

    # Shares

    def _spare(self, tenant: Tenant, tokens: int) -> float:
        """The share of the budget kept from a key that would have so many tokens more.

        If the key has nothing in flight, nothing is kept from it. Nor if it stays within the share that it
        would have beside one more key.
        """
        if not tenant.num_in_flight or (len(self._queue.tenants) == 1 and not tenant.keyed):
            return 0.0
        share = self._share(tenant, others=1) * self.kv_pools.capacity_tokens
        return 0.0 if tenant.in_flight_tokens + tokens <= share else self._tuning.spare_share

    def _kept(self, tenant: Tenant, tokens: int, now_s: float) -> float:
        """The share of the budget kept from a key: by its tier, or else by its own share."""
        is_wanted = self._queue.is_wanted_above(tenant, now_s, self.over_share)
        if is_wanted and not self._queue.has_turn(tenant.rank, now_s):
            return self._tuning.kept_for_higher
        return self._spare(tenant, tokens)

    def _slows_others(self, tenant: Tenant, n: int, now_s: float) -> bool:
        """True if a key that has more than its share of what runs would slow the others' answers too much.

        Then a request of more choices than the window waits until the engine has been idle for `idle_s`
        seconds.
        """
        running = self.num_choices + n
        is_idle = not self.num_choices and now_s - self._ended_s >= self._tuning.idle_s
        if n == running == 1 or is_idle or self.key_window.fits(running):
            return False
        others_weight = self._queue.recent_weight(now_s, besides=tenant)
        share = tenant.weight / (tenant.weight + others_weight)
        return others_weight > 0 and tenant.choices_in_flight + n > self._tuning.above_share * share * running

    def _share(self, tenant: Tenant, *, others: int = 0) -> float:
        """A key's share of everything, among those that are active and so many more."""
        own_weight = 0 if tenant.active else tenant.weight
        return tenant.weight / (self._queue.active_weight + others + own_weight)
