"""Admission: a request is let through to the engine when there is room for it, in its turn.

    admit ──▶ room now? ──▶ Ticket ── saw(delta) … ──▶ release
                 │ no                                     │
                 ▼                                        ▼
           a place in the queue  ◀──── dispatch: whose turn it is, and who fits
                 │ none
                 ▼
           429 or 503, with an appointment

app.admission.scheduler says who fits, by KV memory, the engine's places and the window before its prefill;
app.admission.fair_queue gives turns, app.admission.load_shedder refuses. Only waiting is asynchronous: with
nothing in the queue, `admit` gives way to no other task.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from app.admission.capacity import DecodeWindow, KVBudget, PrefillWindow
from app.admission.estimates import (
    LengthEstimate,
    LengthHistogram,
    Throughput,
    ThroughputProfile,
    expected,
    expected_at_first,
)
from app.admission.fair_queue import FairQueue, Tenant, Tenants
from app.admission.load_shedder import AdmissionCounts, LoadShedder, QueueBounds
from app.admission.scheduler import AdmissionScheduler
from app.admission.ticket import PreAdmission, Ticket, prompt_guess
from app.core import ChatRequest, Delta, Engine, Health, Key, Prompt
from app.errors import Cancelled, ServingError

POLL_S = 0.25
AT_ONCE_S = 0.1
"""A request that was not read for longer is checked by the load shedder though nobody waits."""
MOST_PART = 4.0
"""Tokens of the pool for each guessed one that a single prompt is believed."""
_WEIGHT = 0.2
_GUESS_WEIGHT = 0.05


class Admission:
    """The way into one engine. Construct, `open()` once the engine has started, `run()` beside it.

    `abort_unread` aborts the stream that was without a reader longest, and returns its id if there is one.
    """

    def __init__(
        self,
        engine: Engine,
        bounds: QueueBounds,
        *,
        ttft_target_s: float = 2.0,
        tpot_target_s: float = 0.0,
        key_slowdown: float = 0.0,
        max_prefill_tokens: int = 16_384,
        abort_unread: Callable[[], str | None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        pace: ThroughputProfile | None = None,
    ) -> None:
        self._engine = engine
        self._profile = pace or ThroughputProfile()
        self._bounds = bounds
        self._clock_s = clock_s
        self._chance = chance
        self.queue = FairQueue()
        self.counts = AdmissionCounts()
        self._abort_unread = abort_unread
        self.tenants = Tenants(self.queue)
        prefill_window, self._window = (
            PrefillWindow(ttft_target_s, max_prefill_tokens),
            DecodeWindow(tpot_target_s),
        )
        self._shared_window = DecodeWindow(slowdown=key_slowdown)
        self.scheduler = AdmissionScheduler(
            self.queue, prefill_window, self.tenants, self._window, self._shared_window
        )
        self._model_lengths = LengthHistogram()
        self._guess_part = 1.0
        self._waiting: dict[str, Ticket] = {}
        self._was_ready = False
        self.open()

    # Life

    def open(self) -> None:
        """Begin with an engine that has just started, or started again: the prefill window is narrow."""
        now_s = self._clock_s()
        self._was_ready = self._engine.health() is Health.READY
        guess = 0.0
        if self._was_ready:
            model = self._engine.model
            guess = self._profile.guess(model.id, model.kv_capacity_tokens)
            if not self._model_lengths.total:
                self._model_lengths = self._profile.lengths(model.id)
            self.kv_budget.capacity_tokens = self._engine.model.kv_capacity_tokens
            self.scheduler.in_flight.most_choices = self._engine.load().max_running_reqs
        self.kv_budget.forget_drift()
        self.prefill_window.reset()
        self._window.reset()
        self._shared_window.reset()
        capacity = self.kv_budget.capacity_tokens
        self.throughput = Throughput(guess, now_s, self._profile.worth_s)
        self.load_shedder = LoadShedder(
            self._bounds,
            self.queue,
            self.tenants,
            self.throughput,
            capacity,
            self._chance,
            self.counts,
            self.scheduler,
        )

    @property
    def kv_budget(self) -> KVBudget:
        """The KV memory and who holds it."""
        return self.scheduler.kv_budget

    @property
    def prefill_window(self) -> PrefillWindow:
        """The window before the engine's prefill."""
        return self.scheduler.prefill_window

    @property
    def busy(self) -> bool:
        """Whether requests wait."""
        return bool(self.queue)

    def waited_s(self, rank: int) -> float:
        """How long the oldest request of a tier has waited; 0 when there is none."""
        return self.queue.waited_s(rank, self._clock_s())

    async def run(self) -> None:
        """Keep time, until cancelled."""
        while True:
            await asyncio.sleep(POLL_S)
            self.poll()

    def poll(self) -> None:
        """Do what is due by the clock: deadlines, appointments, the engine's own count, the queue."""
        now_s = self._clock_s()
        ready = self._engine.health() is Health.READY
        if ready and not self._was_ready:
            self.open()
        self._was_ready = ready
        self.throughput.advance(now_s, waiting=bool(self.queue))
        if self.kv_budget.num_reservations and ready:
            load = self._engine.load()
            self.kv_budget.observe(load.used_tokens)
            self.scheduler.in_flight.most_choices = load.max_running_reqs
        for queued in self.queue.overdue(now_s):
            assert isinstance(queued, Ticket)
            self._refuse(queued, self.load_shedder.overdue(queued, now_s))
        self.load_shedder.look(now_s)
        self._dispatch()
        self._reclaim()
        self.tenants.forget_idle(now_s)
        if ready:
            self._profile.observe(self._engine.model.id, self.throughput, self._model_lengths, now_s)

    def refuse_waiting(self, error: Callable[[], ServingError]) -> None:
        """Send away all that wait: the engine is lost, or the server stops."""
        for ticket in list(self._waiting.values()):
            self._refuse(ticket, error())

    # A request

    def precheck(self, request: ChatRequest, key: Key | None = None) -> None:
        """Refuse a request before it is read and rendered, where it would have to be refused after.

        Raises KeyOverloaded, Overloaded.
        """
        now_s = self._clock_s()
        if not self.queue and request.placement.socket_wait_s < AT_ONCE_S:
            return
        tenant = self.tenants.come(request, key, now_s, self.kv_budget.capacity_tokens)
        most = request.max_tokens or self._engine.model.context_length
        growth = expected_at_first(tenant.lengths, self._model_lengths, request.body, most)
        tokens = int(self._guess_part * prompt_guess(request)) + request.n * growth.mean
        self.load_shedder.precheck(PreAdmission(tenant, request, tokens, now_s), now_s)

    async def admit(
        self,
        request: ChatRequest,
        prompt: Prompt,
        key: Key | None = None,
    ) -> Ticket:
        """Wait for room and for its turn; the ticket must be released.

        Raises KeyOverloaded, Overloaded, Cancelled, and what `refuse_waiting` is given.
        """
        now_s = self._clock_s()
        tenant = self.tenants.come(request, key, now_s, self.kv_budget.capacity_tokens)
        growth = expected_at_first(tenant.lengths, self._model_lengths, request.body, prompt.max_tokens)
        ticket = Ticket(
            tenant, request, prompt, growth, now_s, on_progress=self.progressed, on_release=self.released
        )
        self._size(ticket)
        self._learn_guess(request, ticket)
        if (
            not self.queue
            and self.scheduler.fits(ticket, now_s)
            and self.prefill_window.has_room(ticket.uncached_tokens)
            and not self.load_shedder.too_old(ticket)
        ):
            self.load_shedder.came(ticket, now_s)
            self._let_in(ticket, now_s)
            return ticket
        self._wait(ticket, now_s)
        if ticket.admitted_s is None:
            await self._turn(ticket)
        return ticket

    def withdraw(self, rid: str) -> None:
        """Send a waiting request away because nobody wants it any more; unknown ids are ignored."""
        ticket = self._waiting.get(rid)
        if ticket is not None:
            self._refuse(ticket, Cancelled("The request was cancelled while it waited."))
            self._dispatch()

    def progressed(self, ticket: Ticket, delta: Delta) -> None:
        """Called by a ticket that has seen something new."""
        tenant, counts = ticket.tenant, delta.counts
        if ticket.over:
            return
        tokens = ticket.lengths[delta.choice]
        if delta.choice == 0:
            self._paced(ticket, tokens)
        if not ticket.started and tokens:
            self._started(ticket, counts.prompt_tokens, counts.cached_tokens)
        if delta.finish_reason in ("stop", "length", "tool_calls") and tokens and not ticket.exact:
            tenant.lengths.add(tokens)
            self._model_lengths.add(tokens)
        growth = self._growth(tenant, ticket, max(ticket.lengths))
        self.kv_budget.correct(ticket.reservation, growth, sum(ticket.lengths))
        self._charge(ticket, ticket.uncached_tokens + ticket.reservation.mean)

    def released(self, ticket: Ticket) -> None:
        """Called by a ticket that is given back."""
        tenant, now_s = ticket.tenant, self._clock_s()
        assert ticket.admitted_s is not None
        if not ticket.started:
            self.prefill_window.leave(ticket.uncached_tokens)
        self.kv_budget.give_back(ticket.reservation)
        self.scheduler.in_flight.remove(ticket)
        tenant.num_in_flight -= 1
        tenant.choices_in_flight -= ticket.reservation.n
        tenant.in_flight_tokens -= ticket.tokens
        self.tenants.idler(tenant)
        self._charge(ticket, (ticket.uncached_tokens if ticket.started else 0) + sum(ticket.lengths))
        if self.queue:
            self.throughput.advance(now_s, waiting=True)
            self.throughput.freed(ticket.tokens)
            self._dispatch()

    # What a request takes

    def _growth(self, tenant: Tenant, ticket: Ticket, so_far: int) -> LengthEstimate:
        if ticket.exact:
            return LengthEstimate(ticket.max_tokens, 0)
        return expected(tenant.lengths, self._model_lengths, so_far, ticket.max_tokens)

    def _size(self, ticket: Ticket) -> None:
        """Tell how much of its prompt is new to the pool, and probably to the engine's cache."""
        own = ticket.unshared_tokens = len(ticket.reservation.ids) - self.kv_budget.shared_tokens(
            ticket.reservation
        )
        ticket.tokens = max(min(own + ticket.reservation.mean, self.kv_budget.capacity_tokens), 1)
        ticket.uncached_tokens = int(own * (1 - ticket.tenant.cached_part))

    def _learn_guess(self, request: ChatRequest, ticket: Ticket) -> None:
        """How many tokens of the pool a prompt takes by its letters: tokenizers and shared prompts differ."""
        if guess := prompt_guess(request):
            part = min(ticket.unshared_tokens / guess, MOST_PART)
            self._guess_part += _GUESS_WEIGHT * (part - self._guess_part)

    def _started(self, ticket: Ticket, prompt_tokens: int, cached_tokens: int) -> None:
        """The first token: how long it took, and what the engine had cached."""
        assert ticket.admitted_s is not None
        ticket.started = True
        tenant, now_s = ticket.tenant, self._clock_s()
        self.prefill_window.started(
            ticket.uncached_tokens, ticket.admitted_s, now_s, queued_behind=ticket.queued_behind
        )
        uncached = prompt_tokens - cached_tokens
        if ticket.unshared_tokens > 0:
            part = min(max(1 - uncached / ticket.unshared_tokens, 0.0), 1.0)
            tenant.cached_part += _WEIGHT * (part - tenant.cached_part)
        ticket.uncached_tokens = uncached
        if self.queue:
            self._dispatch()

    def _paced(self, ticket: Ticket, tokens: int) -> None:
        """How long its tokens take, of the first choice."""
        now_s, made = self._clock_s(), tokens - ticket.timed_tokens
        if ticket.timed_tokens and made > 0:
            for window in (self._window, self._shared_window):
                window.made(made, now_s - ticket.timed_s, self.scheduler.in_flight.num_choices, now_s)
        ticket.timed_tokens, ticket.timed_s = tokens, now_s

    def _charge(self, ticket: Ticket, tokens: int) -> None:
        ticket.tenant.charge(tokens - ticket.charged_tokens)
        ticket.charged_tokens = tokens

    # Turns

    def _wait(self, ticket: Ticket, now_s: float) -> None:
        """Take a place in the queue, and a look at whose turn it is. Raises KeyOverloaded, Overloaded."""
        tenant = ticket.tenant
        self.throughput.advance(now_s, waiting=bool(self.queue))
        self.load_shedder.enter(ticket, now_s)
        self.tenants.busier(tenant)
        self.queue.enter(ticket)
        self._waiting[ticket.rid] = ticket
        self.scheduler.waiting_uncached_tokens += ticket.uncached_tokens
        self._dispatch()
        if ticket.admitted_s is None:
            self._reclaim()

    async def _turn(self, ticket: Ticket) -> None:
        if ticket.rid not in self._waiting:  # refused meanwhile, by what it had aborted
            raise Cancelled("The request was cancelled while it waited.")
        ticket.future = asyncio.get_running_loop().create_future()
        try:
            await ticket.future
        except BaseException:
            if ticket.rid in self._waiting:
                self._leave(ticket)
                self._dispatch()
            elif ticket.admitted_s is not None:
                ticket.release()
            raise

    def _leave(self, ticket: Ticket) -> None:
        self.queue.remove(ticket)
        del self._waiting[ticket.rid]
        self.scheduler.waiting_uncached_tokens -= ticket.uncached_tokens
        self.tenants.idler(ticket.tenant)

    def _refuse(self, ticket: Ticket, error: ServingError) -> None:
        self._leave(ticket)
        if ticket.future is not None and not ticket.future.done():
            ticket.future.set_exception(error)

    def _dispatch(self) -> None:
        """Let in all whose turn it is and who fit."""
        now_s = self._clock_s()
        while self.queue:
            ticket = self.scheduler.next(now_s)
            if ticket is None:
                return
            self._leave(ticket)
            self._size(ticket)
            self._let_in(ticket, now_s)
            if ticket.future is not None and not ticket.future.done():
                ticket.future.set_result(None)

    def _let_in(self, ticket: Ticket, now_s: float) -> None:
        tenant = ticket.tenant
        self.tenants.busier(tenant)
        self.queue.served(ticket, now_s)
        tenant.num_in_flight += 1
        tenant.choices_in_flight += ticket.reservation.n
        tenant.in_flight_tokens += ticket.tokens
        self.kv_budget.take(ticket.reservation)
        ticket.queued_behind = self.prefill_window.enter(ticket.uncached_tokens, now_s)
        self.scheduler.in_flight.add(ticket, now_s)
        self.counts.admitted[tenant.tier] += 1
        self._charge(ticket, ticket.uncached_tokens + ticket.reservation.mean)

    # AdmissionScheduler taken back

    def _reclaim(self) -> None:
        """While somebody waits for memory: streams that nobody reads end first, as many as it takes."""
        while (blocked := self.scheduler.blocked) is not None:
            if self.scheduler.in_flight.reclaimed_tokens >= blocked.tokens:
                return
            rid = self._abort_unread()
            if rid is None:
                return
            self.counts.unread_aborted += 1
            self.scheduler.in_flight.reclaim(rid)
