"""Who fits, and who may pass whom: the turns of the fair queue against the capacity of the engine."""

from __future__ import annotations

from itertools import islice

from app.admission.capacity import DecodeWindow, PrefillWindow
from app.admission.fair_queue import FairQueue, Tenant
from app.admission.replicas import KVPools
from app.admission.ticket import Ticket
from app.admission.tuning import AdmissionTuning


class AdmissionScheduler:
    """What is in the engine, and what there is room for, of what waits and of what comes.

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
        self.kv_budget = KVPools(tuning)
        self.prefill_window, self.window, self.key_window = prefill_window, window, key_window
        self.num_choices = 0
        """Choices in the engine."""
        self._queue, self._tuning = queue, tuning
        self._max_choices = 0
        self._running: dict[str, Ticket] = {}
        self._blocked: Ticket | None = None
        self._held_back: set[Tenant] = set()
        """Keys that would slow the others' answers too much, as of the last look."""

    # What is in the engine

    def restart(self, capacity_tokens: int, replicas: int = 1) -> None:
        """Begin with an engine that has just started; what it had before is given back as it ends."""
        self.kv_budget.restart(capacity_tokens, replicas)
        for window in (self.prefill_window, self.window, self.key_window):
            window.reset()

    def limit_choices(self, max_choices: int) -> None:
        """Take on how many choices the engine runs at once; 0 where it does not say."""
        self._max_choices = max_choices

    def begin(self, ticket: Ticket, now_s: float) -> None:
        """Let a request in."""
        self._queue.begin(ticket, ticket.reservation.n, now_s)
        self.kv_budget.take(ticket.reservation)
        self._running[ticket.rid] = ticket
        self.num_choices += ticket.reservation.n
        ticket.admit(now_s, queued_behind=self.prefill_window.enter(ticket.uncached_tokens, now_s))

    def end(self, ticket: Ticket) -> None:
        """Take back the room of a request that was let in."""
        if not ticket.started:
            self.prefill_window.leave(ticket.uncached_tokens)
        self.kv_budget.give_back(ticket.reservation)
        self._queue.end(ticket, ticket.reservation.n)
        del self._running[ticket.rid]
        self.num_choices -= ticket.reservation.n

    def reclaim(self, rid: str) -> None:
        """A request was aborted so that others have room; unknown ids are ignored."""
        if rid in self._running:
            self._running[rid].reclaim()

    def started(self, ticket: Ticket, uncached_tokens: int, now_s: float) -> None:
        """A request has its first token, and the engine has computed so many tokens of the prompt."""
        assert ticket.admitted_s is not None
        self.prefill_window.started(
            ticket.uncached_tokens, ticket.admitted_s, now_s, queued_behind=ticket.queued_behind
        )
        ticket.start(uncached_tokens)

    def paced(self, ticket: Ticket, tokens: int, now_s: float) -> None:
        """The first choice of a request has so many tokens."""
        made, took_s = ticket.timed(tokens, now_s)
        if made > 0:
            for window in (self.window, self.key_window):
                window.made(made, took_s, self.num_choices, now_s)

    @property
    def reclaimed_tokens(self) -> int:
        """Tokens of the requests that were aborted so that others have room, and have not ended yet."""
        return sum(ticket.tokens for ticket in self._running.values() if ticket.reclaimed)

    @property
    def half_full(self) -> bool:
        """Whether half of the memory or of the engine's places is taken."""
        memory = 2 * self.kv_budget.committed_tokens >= self.kv_budget.limit_tokens
        return memory or 0 < self._max_choices <= 2 * self.num_choices

    def ends_after_s(self, now_s: float, tokens_per_s: float) -> float:
        """Seconds until requests end as fast as they come, at that throughput: after a burst all are young.

        The tokens in flight over the throughput is how long requests run (Little's law). In a steady flow
        they have run for half of that on average.
        """
        if not self._running:
            return 0.0
        tickets = self._running.values()
        age_s = now_s - sum(ticket.admitted_s or 0.0 for ticket in tickets) / len(tickets)
        return max(
            sum(ticket.tokens for ticket in tickets) / tokens_per_s - self._tuning.young_ages * age_s, 0.0
        )

    # Whose turn it is

    @property
    def blocked(self) -> Ticket | None:
        """Whose turn it was when there was no room for it, while it waits."""
        blocked = self._blocked
        return blocked if blocked is not None and blocked in blocked.tenant.waiting else None

    def next(self, now_s: float) -> Ticket | None:
        """The first in turn that fits. One that does not is passed by others for a while only."""
        blocked: list[Ticket] = []
        self._held_back.clear()
        self._blocked = ticket = None
        scanned = self._tuning.scanned if self._has_place(1, 0.0, within=True) else 1
        for ticket in islice(self._queue.in_turn(now_s), scanned):
            assert isinstance(ticket, Ticket)
            if self._slows_others(ticket.tenant, ticket.reservation.n, now_s):
                self._held_back.add(ticket.tenant)  # nobody waits for what has more than its share
            elif all(self._may_pass(ticket, other) for other in blocked) and self.fits(ticket, now_s):
                if not self.prefill_window.has_room(ticket.uncached_tokens):
                    break
                for passed in blocked:
                    passed.pass_by(ticket.tokens)
                self._blocked = blocked[0] if blocked else None
                return ticket
            else:
                blocked.append(ticket)
                if ticket.bypassed_tokens >= self._tuning.hard_bypass * ticket.tokens:
                    break
        self._blocked = blocked[0] if blocked else None
        return None

    def fits(self, ticket: Ticket, now_s: float) -> bool:
        """Whether the engine has a place and the pool has room, without what is kept for others."""
        tenant, n = ticket.tenant, ticket.reservation.n
        spare = self._spare(tenant, ticket.tokens)
        return (
            not self._slows_others(tenant, n, now_s)
            and self._has_place(n, spare, within=self._within(tenant, n))
            and self.kv_budget.fits(ticket.reservation, spare)
        )

    # Whether one that comes may wait

    def has_room(self, tenant: Tenant, tokens: int, age_s: float, now_s: float) -> bool:
        """Whether a key's next request, of so many tokens, fits behind what waits or past what waits in vain.

        It passes keys that are held back. It passes a key with a request that does not fit and for which all
        wait, if its own key was served no less or asks for little; then it has what is kept for such too.
        """
        held_back = [other for other in self._held_back if other is not tenant]
        n = len(self._queue) - sum(len(other.waiting) for other in held_back) + 1
        passed = sum(other.waiting_tokens for other in held_back)
        uncached = sum(other.waiting_uncached_tokens for other in held_back)
        if self._is_free(n, tokens - passed, -uncached, self._tuning.spare, age_s):
            return True
        blocked, n, own_tokens = self.blocked, len(tenant.waiting) + 1, tenant.waiting_tokens + tokens
        if blocked is None or self._slows_others(tenant, n, now_s):
            return False
        other = blocked.tenant
        if other is tenant:
            passed, uncached = blocked.tokens, blocked.uncached_tokens
            may_pass = blocked.bypassed_tokens < self._tuning.bypass * blocked.tokens
        else:
            passed, uncached = other.waiting_tokens, other.waiting_uncached_tokens
            theirs = other.served + blocked.tokens / other.weight
            served_less = tenant.served + own_tokens / tenant.weight <= theirs
            may_pass = served_less or self._asks_little(tenant, own_tokens, n)
        spare, within = self._spare(tenant, own_tokens), self._within(tenant, n)
        return may_pass and self._is_free(n, tokens - passed, -uncached, spare, age_s, within=within)

    def _is_free(
        self, n: int, tokens: int, uncached_tokens: int, spare: float, age_s: float, *, within: bool = False
    ) -> bool:
        """Whether there is room for all that waits and so many choices and tokens more."""
        return (
            self._has_place(n, spare, within=within)
            and self._queue.uncached_tokens + uncached_tokens <= self.prefill_window.soon_tokens(age_s)
            and self._queue.tokens + tokens <= self.kv_budget.free_tokens(spare)
        )

    # Shares

    def _has_place(self, n: int, spare: float, *, within: bool = False) -> bool:
        """Whether so many choices more would run at once, a part of the places kept; one request may.

        A key `within` its share of the decode window does not wait for what others hold of it beyond theirs.
        """
        if not self.num_choices:
            return True
        choices, limit = self.num_choices + n, self._max_choices
        if limit and choices > limit - int(spare * limit):
            return False
        return within or self.window.has_place(choices, spare)

    def _spare(self, tenant: Tenant, tokens: int) -> float:
        """What part of everything is kept from a key that would have so many tokens more.

        Nothing from a key that has nothing in flight, or stays within its share, were one more key to come.
        """
        if not tenant.num_in_flight or (len(self._queue.tenants) == 1 and not tenant.keyed):
            return 0.0
        share = self._share(tenant, others=1) * self.kv_budget.capacity_tokens
        return 0.0 if tenant.in_flight_tokens + tokens <= share else self._tuning.spare

    def _within(self, tenant: Tenant, n: int) -> bool:
        """Whether a key stays within its share of the decode window with so many choices more."""
        return tenant.choices_in_flight + n <= self._share(tenant) * self.window.max_choices

    def _slows_others(self, tenant: Tenant, n: int, now_s: float) -> bool:
        """Whether a key that has more than its share of what runs would slow the others' answers too much."""
        running = self.num_choices + n
        if n == running == 1 or self.key_window.has_place(running, 0.0):
            return False
        others_weight = self._queue.recent_weight(now_s, besides=tenant)
        share = tenant.weight / (tenant.weight + others_weight)
        return others_weight > 0 and tenant.choices_in_flight + n > self._tuning.above_share * share * running

    def _share(self, tenant: Tenant, *, others: int = 0) -> float:
        """What part of everything is a key's, among those that are active and so many more."""
        own_weight = 0 if tenant.active else tenant.weight
        return tenant.weight / (self._queue.active_weight + others + own_weight)

    def _may_pass(self, ticket: Ticket, blocked: Ticket) -> bool:
        """Whether a request may go before one whose turn it is, and that does not fit.

        Of the same key, or a lower tier: for a while. Of another key: as long as that is not served more by
        it than one such request, or takes next to nothing and has no backlog.
        """
        tenant, other = ticket.tenant, blocked.tenant
        if tenant is other or tenant.rank > other.rank:
            return blocked.bypassed_tokens < self._tuning.bypass * blocked.tokens
        own, theirs = ticket.tokens / tenant.weight, blocked.tokens / other.weight
        if tenant.rank < other.rank or tenant.served + own <= other.served + theirs:
            return True
        return self._asks_little(tenant, ticket.tokens, len(tenant.waiting))

    def _asks_little(self, tenant: Tenant, tokens: int, waiting: int) -> bool:
        """Whether so many tokens more are next to nothing, and so many that wait are no backlog."""
        little = self._tuning.spare / 2 * self.kv_budget.capacity_tokens
        return waiting <= self._tuning.few_waiting and tenant.in_flight_tokens + tokens <= little
