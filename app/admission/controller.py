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

from app.admission.counters import AdmissionCounts
from app.admission.decode_window import DecodeWindow
from app.admission.fair_queue import FairQueue, Lane
from app.admission.kv_budget import Pool
from app.admission.load_shedder import Bounds, Door
from app.admission.output_length import Growth, Lengths, expected, expected_at_first
from app.admission.prefill_window import Gate
from app.admission.scheduler import Room
from app.admission.tenants import Lanes
from app.admission.throughput import Throughput
from app.admission.throughput_profile import Pace
from app.admission.ticket import Knock, Ticket, prompt_guess
from app.core import ChatRequest, Delta, Engine, Health, Key, Prompt
from app.errors import Cancelled, ServingError

POLL_S = 0.25
AT_ONCE_S = 0.1
"""A request that was not read for longer is looked at by the door though nobody waits."""
MOST_PART = 4.0
"""Tokens of the pool for each guessed one that a single prompt is believed."""
_WEIGHT = 0.2
_GUESS_WEIGHT = 0.05


class Admission:
    """The way into one engine. Construct, `open()` once the engine has started, `run()` beside it."""

    def __init__(
        self,
        engine: Engine,
        bounds: Bounds,
        *,
        ttft_target_s: float = 2.0,
        tpot_target_s: float = 0.0,
        key_slowdown: float = 0.0,
        max_prefill_tokens: int = 16_384,
        clock_s: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
        pace: Pace | None = None,
    ) -> None:
        self._engine = engine
        self._pace = pace or Pace()
        self._bounds = bounds
        self._clock_s = clock_s
        self._chance = chance
        self.queue = FairQueue()
        self.counts = AdmissionCounts()
        self.abort_unread: Callable[[], str | None] = lambda: None
        """Aborts the stream that has been without a reader longest, and tells its id, if there is one."""
        self.lanes = Lanes(self.queue)
        gate, self._window = Gate(ttft_target_s, max_prefill_tokens), DecodeWindow(tpot_target_s)
        self._shared_window = DecodeWindow(slowdown=key_slowdown)
        self.room = Room(self.queue, gate, self.lanes, self._window, self._shared_window)
        self._model_lengths = Lengths()
        self._guess_part = 1.0
        self._waiting: dict[str, Ticket] = {}
        self._was_ready = False
        self.open()

    # Life

    def open(self) -> None:
        """Begin with an engine that has just started, or started again: the gate is narrow."""
        now_s = self._clock_s()
        self._was_ready = self._engine.health() is Health.READY
        guess = 0.0
        if self._was_ready:
            model = self._engine.model
            guess = self._pace.guess(model.id, model.kv_capacity_tokens)
            if not self._model_lengths.total:
                self._model_lengths = self._pace.lengths(model.id)
            self.pool.capacity_tokens = self._engine.model.kv_capacity_tokens
            self.room.in_flight.most_choices = self._engine.load().max_running_reqs
        self.pool.forget_drift()
        self.gate.reset()
        self._window.reset()
        self._shared_window.reset()
        capacity = self.pool.capacity_tokens
        self.throughput = Throughput(guess, now_s, self._pace.worth_s)
        self.door = Door(
            self._bounds,
            self.queue,
            self.lanes,
            self.throughput,
            capacity,
            self._chance,
            self.counts,
            self.room,
        )

    @property
    def pool(self) -> Pool:
        """The KV memory and who holds it."""
        return self.room.pool

    @property
    def gate(self) -> Gate:
        """The window before the engine's prefill."""
        return self.room.gate

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
        if self.pool.num_claims and ready:
            load = self._engine.load()
            self.pool.observe(load.used_tokens)
            self.room.in_flight.most_choices = load.max_running_reqs
        for queued in self.queue.overdue(now_s):
            assert isinstance(queued, Ticket)
            self._refuse(queued, self.door.overdue(queued, now_s))
        self.door.look(now_s)
        self._dispatch()
        self._reclaim()
        self.lanes.forget_idle(now_s)
        if ready:
            self._pace.saw(self._engine.model.id, self.throughput, self._model_lengths, now_s)

    def refuse_waiting(self, error: Callable[[], ServingError]) -> None:
        """Send away all that wait: the engine is lost, or the server stops."""
        for ticket in list(self._waiting.values()):
            self._refuse(ticket, error())

    # A request

    def knock(self, request: ChatRequest, key: Key | None = None) -> None:
        """Refuse a request before it is read and rendered, where it would have to be refused after.

        Raises KeyOverloaded, Overloaded.
        """
        now_s = self._clock_s()
        if not self.queue and request.placement.socket_wait_s < AT_ONCE_S:
            return
        lane = self.lanes.come(request, key, now_s, self.pool.capacity_tokens)
        most = request.max_tokens or self._engine.model.context_length
        growth = expected_at_first(lane.lengths, self._model_lengths, request.body, most)
        tokens = int(self._guess_part * prompt_guess(request)) + request.n * growth.mean
        self.door.knock(Knock(lane, request, tokens, now_s), now_s)

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
        lane = self.lanes.come(request, key, now_s, self.pool.capacity_tokens)
        growth = expected_at_first(lane.lengths, self._model_lengths, request.body, prompt.max_tokens)
        ticket = Ticket(self, lane, request, prompt, growth, now_s)
        self._size(ticket)
        self._learn_guess(request, ticket)
        if (
            not self.queue
            and self.room.fits(ticket, now_s)
            and self.gate.has_room(ticket.uncached_tokens)
            and not self.door.too_old(ticket)
        ):
            self.door.came(ticket, now_s)
            self._let_in(ticket, now_s)
            return ticket
        self._wait(ticket, now_s)
        if ticket.let_in_s is None:
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
        lane, counts = ticket.lane, delta.counts
        if ticket.over:
            return
        tokens = ticket.lengths[delta.choice]
        if delta.choice == 0:
            self._paced(ticket, tokens)
        if not ticket.started and tokens:
            self._started(ticket, counts.prompt_tokens, counts.cached_tokens)
        if delta.finish_reason in ("stop", "length", "tool_calls") and tokens and not ticket.exact:
            lane.lengths.add(tokens)
            self._model_lengths.add(tokens)
        growth = self._growth(lane, ticket, max(ticket.lengths))
        self.pool.correct(ticket.claim, growth, sum(ticket.lengths))
        self._charge(ticket, ticket.uncached_tokens + ticket.claim.mean)

    def released(self, ticket: Ticket) -> None:
        """Called by a ticket that is given back."""
        lane, now_s = ticket.lane, self._clock_s()
        assert ticket.let_in_s is not None
        if not ticket.started:
            self.gate.leave(ticket.uncached_tokens)
        self.pool.give_back(ticket.claim)
        self.room.in_flight.remove(ticket)
        lane.num_in_flight -= 1
        lane.choices_in_flight -= ticket.claim.n
        lane.in_flight_tokens -= ticket.tokens
        self.lanes.idler(lane)
        self._charge(ticket, (ticket.uncached_tokens if ticket.started else 0) + sum(ticket.lengths))
        if self.queue:
            self.throughput.advance(now_s, waiting=True)
            self.throughput.freed(ticket.tokens)
            self._dispatch()

    # What a request takes

    def _growth(self, lane: Lane, ticket: Ticket, so_far: int) -> Growth:
        if ticket.exact:
            return Growth(ticket.max_tokens, 0)
        return expected(lane.lengths, self._model_lengths, so_far, ticket.max_tokens)

    def _size(self, ticket: Ticket) -> None:
        """Tell how much of its prompt is new to the pool, and probably to the engine's cache."""
        own = ticket.own_tokens = len(ticket.claim.ids) - self.pool.shared_tokens(ticket.claim)
        ticket.tokens = max(min(own + ticket.claim.mean, self.pool.capacity_tokens), 1)
        ticket.uncached_tokens = int(own * (1 - ticket.lane.cached_part))

    def _learn_guess(self, request: ChatRequest, ticket: Ticket) -> None:
        """How many tokens of the pool a prompt takes by its letters: tokenizers and shared prompts differ."""
        if guess := prompt_guess(request):
            part = min(ticket.own_tokens / guess, MOST_PART)
            self._guess_part += _GUESS_WEIGHT * (part - self._guess_part)

    def _started(self, ticket: Ticket, prompt_tokens: int, cached_tokens: int) -> None:
        """The first token: how long it took, and what the engine had cached."""
        assert ticket.let_in_s is not None
        ticket.started = True
        lane, now_s = ticket.lane, self._clock_s()
        self.gate.started(ticket.uncached_tokens, ticket.let_in_s, now_s, behind=ticket.behind)
        uncached = prompt_tokens - cached_tokens
        if ticket.own_tokens > 0:
            part = min(max(1 - uncached / ticket.own_tokens, 0.0), 1.0)
            lane.cached_part += _WEIGHT * (part - lane.cached_part)
        ticket.uncached_tokens = uncached
        if self.queue:
            self._dispatch()

    def _paced(self, ticket: Ticket, tokens: int) -> None:
        """How long its tokens take, of the first choice."""
        now_s, made = self._clock_s(), tokens - ticket.paced_tokens
        if ticket.paced_tokens and made > 0:
            for window in (self._window, self._shared_window):
                window.made(made, now_s - ticket.paced_s, self.room.in_flight.num_choices, now_s)
        ticket.paced_tokens, ticket.paced_s = tokens, now_s

    def _charge(self, ticket: Ticket, tokens: int) -> None:
        ticket.lane.charge(tokens - ticket.charged_tokens)
        ticket.charged_tokens = tokens

    # Turns

    def _wait(self, ticket: Ticket, now_s: float) -> None:
        """Take a place in the queue, and a look at whose turn it is. Raises KeyOverloaded, Overloaded."""
        lane = ticket.lane
        self.throughput.advance(now_s, waiting=bool(self.queue))
        self.door.enter(ticket, now_s)
        self.lanes.busier(lane)
        self.queue.enter(ticket)
        self._waiting[ticket.rid] = ticket
        self.room.waiting_uncached_tokens += ticket.uncached_tokens
        self._dispatch()
        if ticket.let_in_s is None:
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
            elif ticket.let_in_s is not None:
                ticket.release()
            raise

    def _leave(self, ticket: Ticket) -> None:
        self.queue.remove(ticket)
        del self._waiting[ticket.rid]
        self.room.waiting_uncached_tokens -= ticket.uncached_tokens
        self.lanes.idler(ticket.lane)

    def _refuse(self, ticket: Ticket, error: ServingError) -> None:
        self._leave(ticket)
        if ticket.future is not None and not ticket.future.done():
            ticket.future.set_exception(error)

    def _dispatch(self) -> None:
        """Let in all whose turn it is and who fit."""
        now_s = self._clock_s()
        while self.queue:
            ticket = self.room.next(now_s)
            if ticket is None:
                return
            self._leave(ticket)
            self._size(ticket)
            self._let_in(ticket, now_s)
            if ticket.future is not None and not ticket.future.done():
                ticket.future.set_result(None)

    def _let_in(self, ticket: Ticket, now_s: float) -> None:
        lane = ticket.lane
        self.lanes.busier(lane)
        self.queue.served(ticket, now_s)
        lane.num_in_flight += 1
        lane.choices_in_flight += ticket.claim.n
        lane.in_flight_tokens += ticket.tokens
        self.pool.take(ticket.claim)
        ticket.behind = self.gate.enter(ticket.uncached_tokens, now_s)
        self.room.in_flight.add(ticket, now_s)
        self.counts.let_in[lane.tier] += 1
        self._charge(ticket, ticket.uncached_tokens + ticket.claim.mean)

    # Room taken back

    def _reclaim(self) -> None:
        """While somebody waits for memory: streams that nobody reads end first, as many as it takes."""
        while (blocked := self.room.blocked) is not None:
            if self.room.in_flight.reclaimed_tokens >= blocked.tokens:
                return
            rid = self.abort_unread()
            if rid is None:
                return
            self.counts.unread_aborted += 1
            self.room.in_flight.reclaim(rid)
