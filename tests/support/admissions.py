"""A node in virtual time: an engine with a service model, admission before it, and clients that obey.

Time is that of an event loop that never sleeps: it jumps to the next timer. Clients are coroutines.
"""

from __future__ import annotations

import asyncio
import math
import random
import selectors
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from app.admission.admit import Admission
from app.admission.budget import PrefixTree
from app.admission.estimates import ThroughputProfile
from app.admission.queue import Tenant
from app.admission.ticket import Ticket
from app.admission.tuning import AdmissionTuning
from app.core import ChatRequest, Counts, Delta, EngineLoad, Health, Key, KeyTerms, ModelCard, Prompt, Tier
from app.errors import ServingError
from app.metering.traffic import ITL_S, Histogram
from app.settings import Settings

TUNING = AdmissionTuning()


def limits_of(
    deadline_s: float | None = None, wait_of_ttft: float = math.inf, **fields: Any
) -> tuple[Settings, AdmissionTuning]:
    """Settings with one deadline for all tiers, and a tuning: by default the expected wait has no bound."""
    if deadline_s is not None:
        fields |= dict.fromkeys(("queue_interactive_s", "queue_standard_s", "queue_batch_s"), deadline_s)
    return Settings(**({"key_slowdown": 0.0} | fields)), replace(TUNING, wait_of_ttft=wait_of_ttft)


def count_prompt(request: ChatRequest) -> int:
    """An estimate of a prompt's tokens: one for four letters."""
    return sum(len(message.get("content") or "") for message in request.body["messages"]) // 4


class _Selector(selectors.SelectSelector):
    """Turns waiting into time that has passed."""

    now_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        self.now_s += timeout or 0.0
        return super().select(0)


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps."""

    def __init__(self) -> None:
        self.virtual = _Selector()
        super().__init__(self.virtual)

    def time(self) -> float:
        return self.virtual.now_s


def run_virtually(main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    """Run to the end, in no time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(main())


@dataclass(frozen=True, slots=True)
class Service:
    """How fast the engine is. A decode step gives every running choice one token."""

    capacity_tokens: int = 100_000
    prefill_tokens_per_s: float = 20_000.0
    step_s: float = 0.02
    step_per_request_s: float = 0.0002
    quantum: int = 8
    """Steps simulated at once."""


class _Run:
    def __init__(
        self, request: ChatRequest, prompt: Prompt, tokens: int, take: Callable[[Delta], None]
    ) -> None:
        self.request, self.prompt, self.tokens, self.take = request, prompt, tokens, take
        self.made = 0
        self.cached = 0
        self.aborted = False
        self.done = asyncio.get_running_loop().create_future()


class ServiceEngine:
    """What admission knows of an engine, with prefill before decode, as SGLang does it."""

    def __init__(self, service: Service) -> None:
        self.service = service
        self.health_now = Health.READY
        self.model = ModelCard("m", 1 << 20, service.capacity_tokens, 1 << 20, frozenset())
        self.queue: list[_Run] = []
        self.running: dict[str, _Run] = {}
        self.tree = PrefixTree()
        self.held: dict[str, Any] = {}
        self.most_used = 0
        self.max_running_reqs = 0
        self.overflows = 0
        self.generated = 0
        self._wake = asyncio.Event()

    def health(self) -> Health:
        return self.health_now

    @property
    def used_tokens(self) -> int:
        return self.tree.tokens + sum(run.made for run in self.running.values())

    def load(self) -> EngineLoad:
        return EngineLoad(
            len(self.running),
            len(self.queue),
            self.used_tokens,
            self.service.capacity_tokens,
            0.0,
            self.max_running_reqs,
        )

    async def answer(
        self, request: ChatRequest, prompt: Prompt, tokens: int, take: Callable[[Delta], None]
    ) -> None:
        """Generate; `take` gets the deltas."""
        run = _Run(request, prompt, tokens, take)
        self.queue.append(run)
        self._wake.set()
        await run.done

    def abort(self, rid: str) -> None:
        run = self.running.get(rid) or next((r for r in self.queue if r.request.request_id == rid), None)
        if run is not None:
            run.aborted = True

    async def run(self) -> None:
        """Serve for ever."""
        while True:
            if not self.queue and not self.running:
                self._wake.clear()
                await self._wake.wait()
            if self.queue:
                await self._prefill(self.queue.pop(0))
            else:
                await self._decode()

    async def _prefill(self, run: _Run) -> None:
        ids = run.prompt.token_ids
        run.cached = self.tree.shared_tokens(ids, "")
        self.held[run.request.request_id] = self.tree.insert(ids, "")
        await asyncio.sleep((len(ids) - run.cached) / self.service.prefill_tokens_per_s + 0.002)
        self.running[run.request.request_id] = run
        self._give(run, 1)

    async def _decode(self) -> None:
        service, batch = self.service, list(self.running.values())
        await asyncio.sleep(
            service.quantum
            * (service.step_s + service.step_per_request_s * sum(run.request.n for run in batch))
        )
        for run in batch:
            self._give(run, service.quantum)
        used = self.used_tokens
        self.most_used = max(self.most_used, used)
        self.overflows += used > service.capacity_tokens

    def _give(self, run: _Run, tokens: int) -> None:
        earlier, run.made = run.made, min(run.made + tokens, run.tokens)
        self.generated += run.made - earlier
        over = run.aborted or run.made >= run.tokens
        reason = ("abort" if run.aborted else "stop") if over else None
        counts = Counts(len(run.prompt.token_ids), run.made, run.cached)
        run.take(Delta(0, "text", "", (), counts, reason))
        if over:
            del self.running[run.request.request_id]
            self.tree.release(self.held.pop(run.request.request_id))
            run.done.set_result(None)


@dataclass
class Seen:
    """What one request met."""

    key: str
    at_s: float
    """When it was sent last."""
    refused: list[ServingError] = field(default_factory=list)
    admitted_s: float | None = None
    first_s: float | None = None
    ended_s: float | None = None
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def ttft_s(self) -> float:
        assert self.first_s is not None
        return self.first_s - self.at_s


class Node:
    """One engine, its admission, and everything that was asked of it."""

    def __init__(
        self,
        service: Service | None = None,
        limits: Mapping[str, Any] = MappingProxyType({}),
        seed: int = 0,
        profile: ThroughputProfile | None = None,
        **options: Any,
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.rng = random.Random(seed)
        self.engine = ServiceEngine(service or Service())
        settings, tuning = limits_of(**limits, **options)
        self.admission = Admission(
            self.engine,  # type: ignore[arg-type]
            settings,
            profile or ThroughputProfile(None, TUNING),
            tuning,
            count_prompt=count_prompt,
            itl=Histogram(ITL_S),
            clock_s=self.loop.time,
            chance=self.rng.random,
        )
        self.seen: list[Seen] = []
        self._tasks = [self.loop.create_task(self.engine.run()), self.loop.create_task(self.admission.run())]
        self._number = 0

    def stop(self) -> None:
        """End its tasks, and tell what broke."""
        for task in self._tasks:
            if not task.cancel() and not task.cancelled():
                task.result()

    def spawn(self, client: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Run a client beside the others."""
        task = self.loop.create_task(client)
        self._tasks.append(task)
        return task

    async def ask(
        self,
        key: Key,
        ids: Sequence[int] | int,
        tokens: int,
        max_tokens: int = 4096,
        retries: int = 1,
        *,
        exact: bool = False,
        n: int = 1,
    ) -> Seen:
        """One request of a client that comes back when it was told, unless it was told not to."""
        self._number = number = self._number + 1
        # Bodies differ at their end, as chat prompts do.
        prompt_ids = [number + (1 << 20), *range(ids - 1)] if isinstance(ids, int) else list(ids)
        seen = Seen(key.id, self.loop.time(), prompt_tokens=len(prompt_ids))
        self.seen.append(seen)
        content = f"question {number}".ljust(4 * len(prompt_ids))
        body: dict[str, Any] = {"messages": [{"content": content}], "ignore_eos": exact}
        max_tokens = tokens if exact else max_tokens
        for _ in range(retries + 1):
            seen.at_s = self.loop.time()
            rid = f"r{number}-{len(seen.refused)}"
            request = ChatRequest(rid, key.owner, "m", body, 0, n=n, max_tokens=max_tokens)
            prompt = Prompt(prompt_ids, max_tokens, None)
            try:
                self.admission.precheck(request, key)
                ticket = await self.admission.admit(request, prompt, key)
            except ServingError as error:
                seen.refused.append(error)
                if error.should_retry is False or error.retry_after_s is None:
                    return seen
                await asyncio.sleep(error.retry_after_s)
                continue
            await self._answer(seen, ticket, request, prompt, tokens)
            return seen
        return seen

    async def _answer(
        self, seen: Seen, ticket: Ticket, request: ChatRequest, prompt: Prompt, tokens: int
    ) -> None:
        seen.admitted_s = self.loop.time()

        def take(delta: Delta) -> None:
            seen.first_s = self.loop.time() if seen.first_s is None else seen.first_s
            seen.tokens = delta.counts.completion_tokens
            ticket.on_delta(delta)

        await self.engine.answer(request, prompt, min(tokens, prompt.max_tokens), take)
        ticket.release()
        seen.ended_s = self.loop.time()


def key_of(name: str, tier: Tier = "standard", weight: float = 1.0) -> Key:
    """A key without limits."""
    return Key(name, name, KeyTerms(name, tier=tier, weight=weight), 0)


def tenant_of(admission: Admission, name: str) -> Tenant:
    """A key's track, which has come lately."""
    return next(tenant for tenant in admission.queue.tenants if tenant.name == name)


def percentile(values: Sequence[float], share: float) -> float:
    """The nearest-rank percentile."""
    return sorted(values)[min(int(share * len(values)), len(values) - 1)]
