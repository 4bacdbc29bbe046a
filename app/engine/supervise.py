"""Supervision: restarts with pauses that double, limits, and a history.

| supervised | by | gives up |
|---|---|---|
| the main engine | `RestartPolicy` (app.engine.sglang.recovery) | after `RestartLimits` |
| an engine beside it | `SupervisedEngine` | never |
| a server process, a node's ranks | `supervise` (app.engine.child_server, app.engine.sglang.node) | never |
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Literal, NoReturn, Protocol, get_args, runtime_checkable

from structlog.typing import FilteringBoundLogger

from app.core import Engine, Health
from app.errors import ServingError

FIRST_PAUSE_S = 1.0
MAX_PAUSE_S = 60.0
FIRST_GUESS_S = 10.0
"""Seconds that a restart is expected to take while none has been seen."""

LossCause = Literal["exited", "hung", "failed"]
"""A process of the engine ended, made no progress, or could not be started or understood."""
LOSS_CAUSES: tuple[LossCause, ...] = get_args(LossCause)

MakeEngine = Callable[[Callable[[str], None]], Engine]
"""Makes an engine, which calls back with the reason when its model is lost, for a while or permanently."""


class Backoff:
    """Pauses in seconds: `first_s`, then each twice the last, `longest_s` at most."""

    def __init__(self, first_s: float = FIRST_PAUSE_S, longest_s: float = MAX_PAUSE_S) -> None:
        self._first_s = self._next_s = first_s
        self._longest_s = longest_s

    def next_s(self) -> float:
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin again with the first pause."""
        self._next_s = self._first_s


async def supervise(run: Callable[[], Awaitable[bool]], backoff: Backoff) -> NoReturn:
    """Await `run` again and again until cancelled, with a pause after each.

    `run` returns once what it started has ended. After True the pauses begin again with the first.
    """
    while True:
        if await run():
            backoff.reset()
        await asyncio.sleep(backoff.next_s())


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """The limits of restarts: `restarts` of them in `window_s` seconds, then the engine stays dead.

    `restarts` and `window_s` are the settings `engine_restarts` and `engine_restart_window_s`; the engine's
    end is `SGLangEngine.fail_permanently`.

    An engine is lost when it has made no progress for `hang_s` seconds, and a start has failed that takes
    more than `start_s` seconds; 0 is never.
    """

    restarts: int = 3
    window_s: float = 600.0
    hang_s: float = 120.0
    start_s: float = 1800.0


class RestartPolicy:
    """The decision after each loss of one engine: start it again, after which pause, or give up."""

    def __init__(self, limits: RestartLimits, backoff: Backoff, clock_s: Callable[[], float]) -> None:
        self._limits = limits
        self._backoff = backoff
        self._clock_s = clock_s
        self._losses_s = deque[float]()

    def lost(self) -> None:
        """Count a loss, or a start that failed."""
        self._losses_s.append(self._clock_s())

    def excuse(self) -> None:
        """Forget the last loss, if there was one: its cause is known, and gone."""
        if self._losses_s:
            self._losses_s.pop()

    def begin_outage(self) -> None:
        """Forget the losses before the window. Within an outage all count: starts may fail slowly."""
        oldest_s = self._clock_s() - self._limits.window_s
        while self._losses_s and self._losses_s[0] < oldest_s:
            self._losses_s.popleft()

    def next_pause_s(self) -> float | None:
        """The seconds until the next start; None where the engine was lost too often."""
        if len(self._losses_s) > self._limits.restarts:
            return None
        if len(self._losses_s) > 1:
            return self._backoff.next_s()
        self._backoff.reset()
        return 0.0


class RestartHistory:
    """The losses of one engine since it began, counted, and logged once `attach` was called."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._log: FilteringBoundLogger | None = None
        self._on_restart: Callable[[], None] = lambda: None
        self._lost_at_s: float | None = None
        self.start_s = FIRST_GUESS_S
        """Seconds that the last start took."""
        self.losses: dict[str, int] = dict.fromkeys(LOSS_CAUSES, 0)
        self.num_restarts = 0
        """Restarts after which requests were served again."""
        self.away_s = 0.0
        """Seconds without an engine, in all restarts."""
        self.last_away_s = 0.0
        """Seconds without an engine in the last restart."""
        self.num_choices_continued = 0
        """Choices that continued with another engine."""
        self.num_choices_lost = 0
        """Choices that ended because of a loss."""
        self.num_contradictions = 0
        """Choices that ended because the engine's output for them contradicted itself, or was too late."""
        self.reason: str | None = None
        """The reason of a loss that is not made good yet."""

    def attach(self, log: FilteringBoundLogger, on_restart: Callable[[], None]) -> None:
        """Log from now on, and call `on_restart` when the engine is back, with nothing cached."""
        self._log, self._on_restart = log, on_restart

    def started(self, took_s: float) -> None:
        self.start_s = took_s

    def lost(self, cause: LossCause, reason: str, live: int) -> None:
        """Note a loss, for which `live` choices wait."""
        self.losses[cause] += 1
        self.reason = reason
        if self._lost_at_s is None:
            self._lost_at_s = self._clock_s()
        if self._log is not None:
            hint = "it is being restarted; streams wait for it"
            self._log.error("engine_lost", cause=cause, reason=reason, live_choices=live, hint=hint)

    def recovered(self, resumed: int) -> None:
        """Note that requests are served again."""
        assert self._lost_at_s is not None
        self.last_away_s = self._clock_s() - self._lost_at_s
        self.away_s += self.last_away_s
        self._lost_at_s = self.reason = None
        self.num_restarts += 1
        self.num_choices_continued += resumed
        if self._log is not None:
            self._log.warning("engine_restarted", took_s=round(self.last_away_s, 2), resumed_choices=resumed)
        self._on_restart()

    def count_lost_choices(self, choices: int, rid: str = "", fingerprint: str = "") -> None:
        """Note choices that were lost; with `rid`, those of a request that killed the engine."""
        self.num_choices_lost += choices
        if rid and self._log is not None:
            hint = "the engine died repeatedly while it generated this request; the request is not sent again"
            self._log.error("request_quarantined", request_id=rid, prompt_hmac=fingerprint, hint=hint)

    def contradicted(self, rid: str, what: str) -> None:
        """Note output that contradicts itself."""
        self.num_contradictions += 1
        if self._log is not None:
            self._log.error("engine_contradiction", choice_id=rid, what=what)

    def retry_after_s(self) -> int:
        """Whole seconds until the engine is expected to be back; at least 1."""
        gone_s = 0.0 if self._lost_at_s is None else self._clock_s() - self._lost_at_s
        return max(1, math.ceil(self.start_s - gone_s))


@runtime_checkable
class Restarting(Protocol):
    """An engine that starts itself again after its end, and knows the stage of its start."""

    restarts: RestartHistory

    def start_stage(self) -> str:
        """The stage of the start, in words. It may block for some milliseconds."""
        ...


def start_stage_of(engine: Engine) -> str:
    """The stage of an engine's start, in words. It may block for some milliseconds."""
    return engine.start_stage() if isinstance(engine, Restarting) else "starting the engine"


def history_of(engine: Engine) -> RestartHistory:
    """The history of an engine's restarts; one that stays empty where it does not start itself again."""
    return engine.restarts if isinstance(engine, Restarting) else RestartHistory()


class SupervisedEngine:
    """Starts an engine beside the main one while that serves, and again where it failed to start or has died.

    The end of the engine ends nothing else. `name` is known before the model is.
    """

    def __init__(self, name: str, make: MakeEngine, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.name = name
        self.engine = make(self._lost)
        self.failure: str | None = None
        """The reason for which it was last away."""
        self.num_failures = 0
        self._backoff = Backoff(first_pause_s)
        self._has_started = False
        self._gone = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """The state of the engine, in words."""
        if self.engine.health() is Health.READY:
            return "ready"
        return "starting" if self.failure is None else f"down: {self.failure}"

    async def start(self) -> None:
        """Begin to start it; returns at once, and raises nothing."""
        self._running = asyncio.create_task(supervise(self._run_once, self._backoff), name=f"run {self.name}")

    async def aclose(self) -> None:
        """Stop it; a second call does nothing."""
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        await self.engine.aclose()

    async def _run_once(self) -> bool:
        """Start the engine and wait for its final end; False where it did not start."""
        try:
            await self.engine.start()
        except Exception as exc:  # noqa: BLE001  # any error: the next start may succeed
            self._fail(exc.message if isinstance(exc, ServingError) else type(exc).__name__)
            return False
        self._has_started = True
        while self.engine.health() is not Health.DEAD:
            self._gone.clear()
            await self._gone.wait()
        self._has_started = False
        return True

    def _lost(self, reason: str) -> None:
        if self._has_started:  # else it is the start that fails
            self._fail(reason)
            self._gone.set()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.num_failures += 1
