"""Admission: a request goes to the engine when there is room for it, in a fair order.

    admit ──▶ an obstacle? ── none ──▶ Ticket ── on_delta … ──▶ release
                   │                                               │
                   ▼                                               ▼
             may it wait? ──▶ queue  ◀──── dispatch: which is next in order without an obstacle
                   │ no
                   ▼
             429 or 503, with a retry slot

`scheduler` knows the obstacles, by `budget` and `windows`; `queue` has the order, `load_shedder` refuses.
Only waiting is asynchronous: with nothing in the queue, `admit` yields to no other task.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

from app.admission.estimates import LengthEstimate, ThroughputProfile, expected
from app.admission.gap_sampler import GapSampler
from app.admission.load_shedder import LoadShedder
from app.admission.queue import AdmissionRequest, FairQueue, Tenant
from app.admission.scheduler import AdmissionScheduler
from app.admission.ticket import Ticket, fingerprint_of
from app.admission.tuning import AdmissionTuning
from app.admission.windows import DecodeWindow, PrefillWindow
from app.core import TIERS, ChatRequest, Delta, Engine, Health, Key, Observes, Prompt, Tier
from app.errors import Cancelled, ServingError
from app.settings import Settings


class Admission:
    """The way into one engine. Construct, `open()` once the engine has started, `run()` beside it.

    `count_prompt` estimates the tokens of a request's prompt. `abort_unread` aborts the stream that was
    without a reader longest, and returns its id if there is one.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        profile: ThroughputProfile,
        tuning: AdmissionTuning,
        *,
        count_prompt: Callable[[ChatRequest], int],
        itl: Observes,
        abort_unread: Callable[[], str | None] = lambda: None,
        clock_s: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        self._engine, self._profile, self._tuning, self._clock_s = engine, profile, tuning, clock_s
        self._count_prompt, self._abort_unread = count_prompt, abort_unread
        self.itl = itl
        """Seconds between two tokens of answers, sampled."""
        self.prefill_tokens = self.decode_tokens = 0
        """Tokens that the engine has computed since the process began: of prompts, and after first tokens."""
        self.queue = FairQueue(tuning)
        self.scheduler = AdmissionScheduler(
            self.queue,
            PrefillWindow(settings.ttft_target_s, settings.max_prefill_tokens, tuning),
            DecodeWindow(tuning, settings.tpot_target_s),
            DecodeWindow(tuning, slowdown=settings.key_slowdown),
            tuning,
        )
        self._throughput = profile.throughput("", 0, clock_s())
        self.load_shedder = LoadShedder(
            settings, self.queue, self.scheduler, self._throughput, chance, tuning
        )
        self._model_lengths = profile.lengths("")
        self._new_ratio = 1.0
        """Tokens of a prompt that no other request in flight has, for each estimated one, lately."""
        self.admitted: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        """Requests admitted since the process began."""
        self.num_unread_aborted = 0
        """Streams without a reader that were ended so that others have room, since the process began."""
        self._waiting: dict[str, Ticket] = {}
        self._was_ready = False
        self._capacity_tokens = 0
        self.restart()

    # Life

    def restart(self) -> None:
        """Begin with an engine that has just started, or started again: the windows are narrow."""
        self._was_ready = self._engine.health() is Health.READY
        if self._was_ready:
            model = self._engine.model
            self._throughput = self._profile.throughput(model.id, model.kv_capacity_tokens, self._clock_s())
            if not self._model_lengths.total:
                self._model_lengths = self._profile.lengths(model.id)
            self.scheduler.restart(model.kv_capacity_tokens, model.replicas)
            self._capacity_tokens = model.kv_capacity_tokens
            self.scheduler.limit_choices(self._engine.load().max_running_reqs)
            self.load_shedder.restart(self._throughput)

    @property
    def busy(self) -> bool:
        """True if requests wait."""
        return bool(self.queue)

    def waited_s(self, rank: int) -> float:
        """Seconds that the oldest request of a tier has waited; 0 when there is none."""
        return self.queue.waited_s(rank, self._clock_s())

    def places(self) -> dict[str, int]:
        """The place of each waiting request in the present order; the next one has 1."""
        # Behind those that the order looks at stands the rest of keys that have many.
        ordered = dict.fromkeys([*self.queue.in_order(self._clock_s()), *self.queue])
        return {queued.rid: n for n, queued in enumerate(ordered, 1) if isinstance(queued, Ticket)}

    async def run(self) -> None:
        """Poll, until cancelled."""
        while True:
            await asyncio.sleep(self._tuning.poll_s)
            self.poll()

    def poll(self) -> None:
        """Do what is due by the clock: deadlines, retry slots, the engine's own count, the queue."""
        now_s = self._clock_s()
        ready = self._engine.health() is Health.READY
        # A restart may have been over between two looks, with a smaller pool.
        if ready and (not self._was_ready or self._engine.model.kv_capacity_tokens != self._capacity_tokens):
            self.restart()
        self._was_ready = ready
        self._throughput.advance(now_s, waiting=self.busy)
        if self.scheduler.kv_pools.num_allocations and ready:
            load = self._engine.load()
            self.scheduler.kv_pools.observe(load)
            self.scheduler.limit_choices(load.max_running_reqs)
        for queued, error in self.load_shedder.overdue(now_s):
            assert isinstance(queued, Ticket)
            self._refuse(queued, error)
        self.load_shedder.expire(now_s)
        self._dispatch()
        self._reclaim()
        self.queue.forget_idle(now_s)
        if ready:
            self._profile.observe(self._engine.model.id, self._throughput, self._model_lengths, now_s)

    def refuse_waiting(self, error: Callable[[], ServingError]) -> None:
        """Refuse all that wait: the engine is lost, or the server stops."""
        for ticket in list(self._waiting.values()):
            self._refuse(ticket, error())

    # A request

    def precheck(self, request: ChatRequest, key: Key | None = None) -> None:
        """Refuse a request that would have to be refused after rendering.

        Raises KeyOverloaded, Overloaded.
        """
        now_s, socket_wait_s = self._clock_s(), request.placement.socket_wait_s
        if not self.busy and socket_wait_s < self._tuning.at_once_s:
            return
        tenant = self.queue.touch(request, key, now_s, self.scheduler.kv_pools.capacity_tokens)
        growth = self._expect(tenant, request, request.max_tokens or self._engine.model.context_length)
        tokens = int(self._new_ratio * self._count_prompt(request)) + request.n * growth.mean
        queued = AdmissionRequest(tenant, tokens, now_s, socket_wait_s, fingerprint_of(request))
        self.load_shedder.precheck(queued, now_s)

    async def admit(self, request: ChatRequest, prompt: Prompt, key: Key | None = None) -> Ticket:
        """Wait until a request may go to the engine; the ticket must be released.

        Raises KeyOverloaded, Overloaded, Cancelled, and what `refuse_waiting` is given.
        """
        now_s = self._clock_s()
        tenant = self.queue.touch(request, key, now_s, self.scheduler.kv_pools.capacity_tokens)
        ticket = Ticket(
            tenant,
            request,
            prompt,
            self._expect(tenant, request, prompt.max_tokens),
            now_s,
            step_tokens=self._tuning.step_tokens,
            gaps=GapSampler(self.itl, self._clock_s),
            on_progress=self._progressed,
            on_release=self._released,
        )
        self.scheduler.measure_uncached(ticket)
        if self.busy and (estimate := self._count_prompt(request)):
            ratio = min(ticket.uncached_tokens / estimate, self._tuning.max_new_ratio)
            self._new_ratio += self._tuning.new_weight * (ratio - self._new_ratio)
        if (
            not self.busy
            and self._engine.health() is Health.READY
            and self.scheduler.obstacle(ticket, now_s) is None
            and not self.load_shedder.is_too_old(ticket)
        ):
            self.load_shedder.use_slot(ticket, now_s)
            self._admit(ticket, now_s)
        else:
            await self._wait(ticket, now_s)
        return ticket

    def withdraw(self, rid: str) -> None:
        """Refuse a waiting request whose stream is cancelled; unknown ids are ignored.

        `Pipeline.serve` sets it as the stream's `on_cancel`, for as long as the request waits.
        """
        ticket = self._waiting.get(rid)
        if ticket is not None:
            self._refuse(ticket, Cancelled("The request was cancelled while it waited."))
            self._dispatch()

    def _progressed(self, ticket: Ticket, delta: Delta) -> None:
        """Called by a ticket at a first token, every `step_tokens`, and at ends of choices."""
        tenant, tokens = ticket.tenant, ticket.lengths[delta.choice]
        self.decode_tokens += ticket.new_tokens
        if ticket.is_released:
            return
        if delta.choice == 0:
            self.scheduler.observe_decode(ticket, tokens, self._clock_s())
        if not ticket.started and tokens:
            uncached_tokens = delta.counts.prompt_tokens - delta.counts.cached_tokens
            self.prefill_tokens += uncached_tokens
            self.scheduler.started(ticket, uncached_tokens, self._clock_s())
            self._dispatch()
        if delta.finish_reason in ("stop", "length", "tool_calls") and tokens and not ticket.has_exact_length:
            tenant.lengths.add(tokens)
            self._model_lengths.add(tokens)
        if delta.finish_reason is not None and len(ticket.lengths) == 1:
            growth = LengthEstimate(tokens, 0)
        elif ticket.has_exact_length:
            growth = LengthEstimate(ticket.max_tokens, 0)
        else:
            growth = expected(
                tenant.lengths, self._model_lengths, max(ticket.lengths), ticket.max_tokens, self._tuning
            )
        self.scheduler.kv_pools.correct(ticket.allocation, growth, sum(ticket.lengths))
        ticket.charge(ticket.uncached_tokens + ticket.allocation.mean)

    def _released(self, ticket: Ticket) -> None:
        """Called by a ticket that is given back."""
        now_s = self._clock_s()
        self.scheduler.end(ticket, now_s)
        ticket.charge((ticket.uncached_tokens if ticket.started else 0) + sum(ticket.lengths))
        if self.busy:
            self._throughput.advance(now_s, waiting=True)
            self._throughput.freed(ticket.tokens)
            self._dispatch()

    # What a request takes

    def _expect(self, tenant: Tenant, request: ChatRequest, max_tokens: int) -> LengthEstimate:
        """The length of an answer that has not begun."""
        if request.body.get("ignore_eos"):
            return LengthEstimate(max_tokens, 0)
        min_tokens = min(request.body.get("min_tokens") or 0, max_tokens)
        return expected(tenant.lengths, self._model_lengths, min_tokens, max_tokens, self._tuning)

    # Waiting

    async def _wait(self, ticket: Ticket, now_s: float) -> None:
        """Put it into the queue until it is admitted. Raises what `admit` does."""
        self._throughput.advance(now_s, waiting=self.busy)
        self.load_shedder.enter(ticket, now_s)
        self.queue.enter(ticket)
        self._waiting[ticket.rid] = ticket
        self._dispatch()
        if ticket.rid in self._waiting:
            self._reclaim()
        if ticket.rid in self._waiting:
            await self._admission_of(ticket)
        elif ticket.admitted_s is None:  # withdrawn by the end of what it had aborted
            raise Cancelled("The request was cancelled while it waited.")

    async def _admission_of(self, ticket: Ticket) -> None:
        """Wait for a ticket. If the task is cancelled meanwhile, its place or its room is given back."""
        try:
            await ticket.wait()
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

    def _refuse(self, ticket: Ticket, error: ServingError) -> None:
        self._leave(ticket)
        ticket.refuse(error)

    def _dispatch(self) -> None:
        """Admit all that are next in order and fit; while the engine is away, none."""
        if self._engine.health() is not Health.READY:
            return
        now_s = self._clock_s()
        while self.busy and (ticket := self.scheduler.next(now_s)) is not None:
            self._leave(ticket)
            self.scheduler.measure_uncached(ticket)
            self._admit(ticket, now_s)

    def _admit(self, ticket: Ticket, now_s: float) -> None:
        self.scheduler.begin(ticket, now_s)
        self.admitted[ticket.tenant.tier] += 1
        ticket.charge(ticket.uncached_tokens + ticket.allocation.mean)

    def _reclaim(self) -> None:
        """While a request waits for memory, streams without a reader are ended, as many as are needed."""
        while (blocked := self.scheduler.blocked) is not None:
            if self.scheduler.reclaimed_tokens >= blocked.tokens or (rid := self._abort_unread()) is None:
                return
            self.num_unread_aborted += 1
            self.scheduler.reclaim(rid)
