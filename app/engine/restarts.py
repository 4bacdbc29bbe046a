"""What an engine that starts itself again tells: its losses by cause, and what became of its streams."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol, get_args, runtime_checkable

from app.core import Engine

LossCause = Literal["exited", "hung", "failed"]
"""A process of the engine ended, made no progress, or could not be started or understood."""
LOSS_CAUSES: tuple[LossCause, ...] = get_args(LossCause)

FIRST_GUESS_S = 10.0
"""Seconds that a restart is expected to take while none has been seen."""


@dataclass(frozen=True, slots=True)
class RestartLimits:
    """The limits of restarts: `restarts` of them in `window_s` seconds, then the engine stays dead.

    An engine is lost when it has made no progress for `hang_s` seconds, and a start has failed that takes
    more than `start_s` seconds; 0 is never.
    """

    restarts: int = 3
    window_s: float = 600.0
    hang_s: float = 120.0
    start_s: float = 1800.0


class RestartListener(Protocol):
    """Whoever is told of an engine's losses, on the event loop."""

    def engine_lost(self, cause: LossCause, reason: str, live: int) -> None:
        """The engine has gone, for a while; `live` choices wait for it."""
        ...

    def engine_restarted(self, took_s: float, resumed: int) -> None:
        """It is back, and `resumed` choices go on."""
        ...

    def request_ended(self, rid: str, fingerprint: str) -> None:
        """A request under which the engine died again and again was ended."""
        ...

    def output_refused(self, rid: str, what: str) -> None:
        """The engine's output for a choice contradicts itself."""
        ...


class RestartHistory:
    """The losses of one engine since it began, counted; a listener is told of each."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._clock_s = clock_s
        self._listener: RestartListener | None = None
        self._lost_at_s: float | None = None
        self.start_s = FIRST_GUESS_S
        """Seconds that the last start took."""
        self.losses: dict[str, int] = dict.fromkeys(LOSS_CAUSES, 0)
        self.num_restarts = 0
        """Restarts after which requests were served again."""
        self.away_s = 0.0
        """Seconds without an engine, in all restarts."""
        self.last_away_s = 0.0
        """The same for the last restart."""
        self.num_resumed = 0
        """Choices that went on with another engine."""
        self.num_lost = 0
        """Choices that ended because of a loss."""
        self.num_refused = 0
        """Choices that ended because the engine's output for them contradicted itself, or came too late."""
        self.reason: str | None = None
        """The reason of a loss that is not made good yet."""

    def listen(self, listener: RestartListener) -> None:
        """Have `listener` told from now on."""
        self._listener = listener

    def started(self, took_s: float) -> None:
        """Note how long a start took."""
        self.start_s = took_s

    def lost(self, cause: LossCause, reason: str, live: int) -> None:
        """Note a loss."""
        self.losses[cause] += 1
        self.reason = reason
        if self._lost_at_s is None:
            self._lost_at_s = self._clock_s()
        if self._listener is not None:
            self._listener.engine_lost(cause, reason, live)

    def recovered(self, resumed: int) -> None:
        """Note that requests are served again."""
        assert self._lost_at_s is not None
        self.last_away_s = self._clock_s() - self._lost_at_s
        self.away_s += self.last_away_s
        self._lost_at_s = self.reason = None
        self.num_restarts += 1
        self.num_resumed += resumed
        if self._listener is not None:
            self._listener.engine_restarted(self.last_away_s, resumed)

    def ended(self, choices: int, rid: str = "", fingerprint: str = "") -> None:
        """Note choices that were lost; with `rid`, those of a request that the engine died under."""
        self.num_lost += choices
        if rid and self._listener is not None:
            self._listener.request_ended(rid, fingerprint)

    def refused(self, rid: str, what: str) -> None:
        """Note output that contradicts itself."""
        self.num_refused += 1
        if self._listener is not None:
            self._listener.output_refused(rid, what)

    def retry_after_s(self) -> int:
        """Whole seconds until the engine is expected to be back; at least 1."""
        gone_s = 0.0 if self._lost_at_s is None else self._clock_s() - self._lost_at_s
        return max(1, math.ceil(self.start_s - gone_s))


@runtime_checkable
class Restarting(Protocol):
    """An engine that starts itself again after its end."""

    restarts: RestartHistory


@runtime_checkable
class Staged(Protocol):
    """An engine that knows what its start is doing."""

    def start_stage(self) -> str:
        """What the start is doing now, in words. It may block for some milliseconds."""
        ...


def start_stage_of(engine: Engine) -> str:
    """What an engine's start is doing now, in words. It may block for some milliseconds."""
    return engine.start_stage() if isinstance(engine, Staged) else "starting the engine"


def history_of(engine: Engine) -> RestartHistory:
    """The history of an engine's restarts; one that stays empty where it does not start itself again."""
    return engine.restarts if isinstance(engine, Restarting) else RestartHistory()
