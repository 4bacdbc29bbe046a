"""The recovery from the loss of an engine: it is restarted, and its choices continue, in their old order.

    lost ──▶ pause ──▶ restart ──▶ suspects, one by one ──▶ the others, a few at a time ──▶ recovered
               ▲          │ fails       │ lost again             │ lost again
               └──────────┴─────────────┴────────────────────────┘     too often ──▶ given up

A request is a suspect when two engines in a row were lost with it, with hardly any progress in between.
An engine that is lost while a suspect is tried alone was killed by it: the request ends, the others continue.

A loss is noticed by the watchdog (app.engine.sglang.watchdog), by the descriptors of SGLang's processes
(`SGLangRun`, app.engine.sglang.run) or by their SIGQUIT (`SGLangEngine.on_child_failure`). All call
`SGLangRun.lose`, and that calls `Recovery.lose`, by way of `SGLangEngine` (app.engine.sglang.engine). The
choices that continue, and the ids behind which they do, are in app.engine.sglang.live_choices.
"""

from __future__ import annotations

import asyncio
import hmac
import secrets
import time
from array import array
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Protocol

from app.engine.sglang.live_choices import LiveChoice, LiveChoices
from app.engine.supervise import Backoff, LossCause, RestartHistory, RestartLimits, RestartPolicy
from app.errors import EngineFailed

POLL_S = 0.02
"""Seconds between two looks at what a choice has generated; nothing is spent on it per token."""
MAX_PREFILL_TOKENS = 16_384
"""Tokens of prompts and answers that may be on their way into the engine at once."""
PREFILL_WAIT_S = 5.0
"""Seconds after which choices are sent, although the prompts of those before them are not read."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 30.0
ENDED = "The engine ended each time that this request was generated, so it was not sent again."


class EngineLost(Exception):
    """The engine was lost again before all choices were sent."""


class Restartable(Protocol):
    """An engine as its recovery uses it."""

    async def restart(self) -> None: ...

    async def submit(self, choice: LiveChoice) -> None: ...

    def recovered(self) -> None: ...

    def fail_permanently(self, reason: str) -> None: ...


class Recovery:
    """Brings one engine back after each loss, until there are too many."""

    def __init__(
        self,
        engine: Restartable,
        live: LiveChoices,
        limits: RestartLimits,
        history: RestartHistory,
        *,
        clock_s: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._engine = engine
        self._live = live
        self._policy = RestartPolicy(limits, Backoff(FIRST_PAUSE_S, MAX_PAUSE_S), clock_s)
        self._history = history
        self._clock_s = clock_s
        self._sleep = sleep
        self._reason = ""
        self._is_lost = False
        self._secret = secrets.token_bytes(16)
        self._tried: list[LiveChoice] = []
        """The choices of the suspect that is being tried."""
        self._task: asyncio.Task[None] | None = None

    def lose(self, cause: LossCause, reason: str) -> None:
        """Have the choices wait, and bring the lost engine back. Called by `SGLangEngine`, once a loss."""
        tried, self._tried = self._tried, []
        waiting = self._live.lose_engine()
        self._history.lost(cause, reason, len(waiting))
        self._reason, self._is_lost = reason, True
        if not tried:
            self._policy.lost()
        else:
            self._end(tried)
            self._policy.excuse()  # the loss that made it a suspect is explained, as this one is
        if self._task is None:
            self._task = asyncio.create_task(self._recover(), name="engine recovery")

    async def aclose(self) -> None:
        """Stop; a second call does nothing."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.wait([task])

    async def _recover(self) -> None:
        self._policy.begin_outage()
        while True:
            pause_s = self._policy.next_pause_s()
            if pause_s is None:
                self._task = None
                self._engine.fail_permanently(self._reason)
                return
            if pause_s:
                await self._sleep(pause_s)
            self._is_lost = False
            try:
                await self._engine.restart()
                resumed = await self._resume()
            except EngineLost:
                continue
            except Exception as exc:  # noqa: BLE001  # any error: the next start may succeed
                self._start_failed(exc)
                continue
            self._task = None
            self._history.recovered(resumed)
            self._engine.recovered()
            return

    def _start_failed(self, exc: Exception) -> None:
        self._reason = f"SGLang did not start: {type(exc).__name__}: {exc}"
        self._policy.lost()
        self._history.lost("failed", self._reason, len(self._live.lose_engine()))

    async def _resume(self) -> int:
        """Send all that wait, and those that begin to wait meanwhile; returns how many. Raises EngineLost."""
        resumed = await self._try_suspects()
        prefilling = deque[LiveChoice]()
        since_s = self._clock_s()
        while self._live.waiting:
            choice = next(iter(self._live.waiting.values()))
            while prefilling and sum(each.num_tokens for each in [*prefilling, choice]) > MAX_PREFILL_TOKENS:
                if self._has_prefilled(prefilling[0]):
                    prefilling.popleft()
                    since_s = self._clock_s()
                elif self._clock_s() - since_s > PREFILL_WAIT_S:
                    break
                else:
                    await self._wait()
            await self._submit(choice)
            prefilling.append(choice)
            resumed += 1
        return resumed

    async def _try_suspects(self) -> int:
        """Send each suspect alone, and wait until it makes progress or ends; returns how many were sent."""
        resumed = 0
        suspects = list(dict.fromkeys(c.request_id for c in self._live.waiting.values() if c.is_suspect))
        for request_id in suspects:
            self._tried = [c for c in self._live.waiting.values() if c.request_id == request_id]
            for choice in list(self._tried):
                await self._submit(choice)
                resumed += 1
            while any(self._live.has(choice.rid) and not choice.made_progress for choice in self._tried):
                await self._wait()
            self._tried = []
        return resumed

    async def _submit(self, choice: LiveChoice) -> None:
        if self._is_lost:
            raise EngineLost
        if self._live.waiting.pop(choice.rid, None) is None:
            return
        try:
            await self._engine.submit(choice)
        except BaseException:
            if not self._is_lost:  # a loss has put it back by itself, or it was aborted and has ended
                self._live.wait(choice)
            raise

    async def _wait(self) -> None:
        await self._sleep(POLL_S)
        if self._is_lost:
            raise EngineLost

    def _has_prefilled(self, choice: LiveChoice) -> bool:
        """True if the engine has read a choice's prompt."""
        rid = choice.rid
        return rid not in self._live.replaying and (rid not in self._live.running or bool(choice.ids))

    def _fingerprint(self, choice: LiveChoice) -> str:
        """A hash of a choice's prompt under this process's own key, for the log."""
        token_ids = array("I", choice.request.input_ids).tobytes()
        return hmac.digest(self._secret, token_ids, "sha256").hex()[:32]

    def _end(self, choices: list[LiveChoice]) -> None:
        """End a request that the engine died under, again and again."""
        ended = [choice for choice in choices if self._live.waiting.pop(choice.rid, None) is not None]
        if ended:
            self._history.count_lost_choices(len(ended), ended[0].request_id, self._fingerprint(ended[0]))
        for choice in ended:
            choice.sink.fail(EngineFailed(ENDED, code="engine_restarted"))
