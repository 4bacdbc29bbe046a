"""The delays of a scripted generation, and the speed of an engine whose requests share it.

As SGLang does it: a prompt waits until the pool has room for it, prompts are taken in before running
requests continue, all at once that wait and fit; a decode step gives each of those a token and takes the
longer the more there are, and the more they hold. Either is a pass through the model, which takes `step_s`
however little is in it, the first one after a pause `wake_s` more, and not each time the same. When the
pool is full in mid-answer, the newest request is set aside and begins again with what it had (a
retraction).
"""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from app.errors import EngineFailed

MAX_PREFILL_TOKENS = 16_384
"""Tokens of several prompts taken in at once, as SGLang's `max_prefill_tokens`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceRates:
    """Rates in tokens per second and times in seconds; a rate of 0 has no limit.

    A pass takes a log-normal time about what it would take; `spread` is the deviation of its logarithm.
    """

    prefill_rate: float = 0.0
    step_s: float = 0.0
    step_per_request_s: float = 0.0
    step_per_held_token_s: float = 0.0
    """Seconds of a step for each token that the running requests hold in the pool."""
    wake_s: float = 0.0
    spread: float = 0.0


class Run:
    """A generation that waits for its next token; an abort ends it early, an engine's death with an error.

    It has tokens in the KV pool, which it holds, or which are to be computed.
    """

    __slots__ = ("_waiter", "_wanted_tokens", "aborted", "error", "held_tokens", "uncached_tokens")

    def __init__(self, prompt_tokens: int = 0, cached_tokens: int = 0) -> None:
        self.aborted = False
        self.error: EngineFailed | None = None
        self.held_tokens = prompt_tokens
        self.uncached_tokens = prompt_tokens - cached_tokens
        self._wanted_tokens = 0
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Continue the generation, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def woken(self) -> None:
        """Wait for `wake`; at once when aborted. Raises EngineFailed when the engine dies meanwhile."""
        if self.aborted:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """Have the generation end with finish reason `abort`."""
        self.aborted = True
        self.wake()

    def fail(self, message: str) -> None:
        """Have the generation end with EngineFailed."""
        self.error = EngineFailed(message)
        self.wake()

    def want(self, count: int) -> None:
        """Wait for so many tokens of the next decode step."""
        self._wanted_tokens = count

    def take_wanted(self) -> int:
        """Hold the tokens waited for; returns their number."""
        self.held_tokens += self._wanted_tokens
        return self._wanted_tokens

    def retract(self) -> None:
        """Lose the KV memory: all tokens so far are to be computed again."""
        self.uncached_tokens = self.held_tokens


class Service:
    """Serves the runs that have entered, while there are any."""

    def __init__(self, rates: ServiceRates, pool_tokens: int, seed: int = 0) -> None:
        self._rates = rates
        self._pool_tokens = pool_tokens
        self._rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
        self._waiting: deque[Run] = deque()
        self._running: dict[Run, None] = {}
        self._asking: dict[Run, None] = {}
        """The running requests that wait for their next token."""
        self._task: asyncio.Task[None] | None = None
        self._asleep = True
        self.used_tokens = 0
        self.num_retractions = 0

    @property
    def num_waiting(self) -> int:
        """Requests that are not taken in yet."""
        return len(self._waiting)

    def enter(self, run: Run) -> None:
        """Queue for the prefill; the request is woken when its first token is due."""
        self._waiting.append(run)
        if self._task is None or self._task.done():
            self._task = asyncio.get_running_loop().create_task(self._serve(), name="scripted service")

    def next_tokens(self, run: Run, count: int) -> None:
        """Wait for the next decode step, and so many tokens of it; the request is woken then."""
        run.want(count)
        self._asking[run] = None

    def leave(self, run: Run) -> None:
        """Give the place up."""
        self._asking.pop(run, None)
        if run in self._running:
            del self._running[run]
            self.used_tokens -= run.held_tokens
        elif run in self._waiting:
            self._waiting.remove(run)

    async def _serve(self) -> None:
        while self._waiting or self._running:
            runs = list(self._admitted())
            if runs:
                await self._prefill(runs)
            else:
                await self._step()
        self._asleep = True

    async def _pass(self, more_s: float) -> None:
        """One pass through the model, with so much to do in it."""
        rates = self._rates
        took_s = rates.step_s + more_s + (rates.wake_s if self._asleep else 0.0)
        self._asleep = False
        await asyncio.sleep(took_s * self._rng.lognormvariate(0.0, rates.spread) if rates.spread else took_s)

    def _fits(self, run: Run) -> bool:
        """A prompt needs a page beyond itself; into an empty pool everything fits."""
        return not self._running or self.used_tokens + run.held_tokens + 16 <= self._pool_tokens

    def _admitted(self) -> Iterator[Run]:
        """The first of those that wait, as many as fit; beside others no more than so much prompt."""
        tokens = 0
        while self._waiting and self._fits(self._waiting[0]):
            tokens += self._waiting[0].uncached_tokens
            if self._waiting[0].uncached_tokens < tokens > MAX_PREFILL_TOKENS:
                return
            run = self._waiting.popleft()
            self._running[run] = None
            self.used_tokens += run.held_tokens
            yield run

    async def _prefill(self, runs: Sequence[Run]) -> None:
        rate = self._rates.prefill_rate
        uncached_tokens = sum(run.uncached_tokens for run in runs)
        await self._pass(uncached_tokens / rate if rate else 0.0)
        for run in runs:
            if run in self._running:  # it may have left meanwhile
                self._asking.pop(run, None)
                run.wake()

    async def _step(self) -> None:
        """A token for each that runs."""
        while len(self._running) > 1 and self.used_tokens + len(self._running) > self._pool_tokens:
            self._retract(next(reversed(self._running)))
        rates = self._rates
        each_s = rates.step_per_request_s * len(self._running)
        await self._pass(each_s + rates.step_per_held_token_s * self.used_tokens)
        for run in [waiting for waiting in self._asking if waiting in self._running]:
            del self._asking[run]
            self.used_tokens += run.take_wanted()
            run.wake()

    def _retract(self, run: Run) -> None:
        del self._running[run]
        self.used_tokens -= run.held_tokens
        run.retract()
        self.num_retractions += 1
        self._waiting.appendleft(run)
