"""Degraded mode: what the node does less of while its queue is too long, step by step, and back.

    normal ──▶ short ──▶ small ──▶ refuse       one step up after `rise_s` above its `enter`
       ◀──────── ◀──────── ◀────────            one step down after `fall_s` below its `leave`

*short* gives shorter answers, *small* sends to the small model as well; in *refuse* the queue is full, and
what it does not take is refused, key by key, by admission (app.admission.load_shedder). Each step's
`leave` lies below its `enter`. Between two changes pass at least min(`rise_s`, `fall_s`) seconds, so swinging
pressure does not swing the mode. The headers `x-degraded` and `x-served-model` report it.
"""

from __future__ import annotations

import enum
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from app.core import ChatRequest, ModelCard
from app.routing.router import EMPTY_BRANCH, unserved
from app.settings import Settings
from app.store.conversations import BranchSummary

SHORT_OUTPUT = "short-output"
SMALL_MODEL = "small-model"
REFUSED = "refused"


class Step(enum.IntEnum):
    """The steps of degraded mode; each also does what the lower ones do."""

    NORMAL = 0
    SHORT = 1
    SMALL = 2
    REFUSE = 3

    @property
    def label(self) -> str:
        """The step's name in `/readyz` and the metrics."""
        return self.name.lower()


class Hysteresis(NamedTuple):
    """The pressure from which on a step is entered, and below which it is left."""

    enter: float
    leave: float


BOUNDS: Mapping[Step, Hysteresis] = {
    Step.SHORT: Hysteresis(0.5, 0.3),
    Step.SMALL: Hysteresis(0.75, 0.5),
    Step.REFUSE: Hysteresis(1.0, 0.7),
}


@dataclass(frozen=True, slots=True)
class Degraded:
    """The decision about one request: its model, and the tokens that its answer may have."""

    model: str
    max_tokens: int | None
    measures: Sequence[str] = ()

    @property
    def headers(self) -> Mapping[str, str]:
        """`x-degraded` and `x-served-model`, where anything was done."""
        if not self.measures:
            return {}
        return {"x-degraded": ", ".join(self.measures), "x-served-model": self.model}


class DegradedMode:
    """The mode, moved by `observe`, applied by `apply`."""

    def __init__(
        self,
        *,
        rise_s: float = 2.0,
        fall_s: float = 10.0,
        short_tokens: int = 512,
        default_tokens: float = math.inf,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`default_tokens` is the length that an answer may have where its request sets no limit."""
        self._rise_s, self._fall_s = rise_s, fall_s
        self._short_tokens, self._default_tokens = short_tokens, default_tokens
        self._clock_s = clock_s
        self.step = Step.NORMAL
        self.changes: Counter[str] = Counter()
        """The number of times that each step was entered."""
        self.requests_by_measure: Counter[str] = Counter({SHORT_OUTPUT: 0, SMALL_MODEL: 0, REFUSED: 0})
        """Requests by the measure that was taken: SHORT_OUTPUT, SMALL_MODEL, REFUSED."""
        self.pressure = 0.0
        """The pressure as last observed."""
        self._above_since_s: float | None = None
        self._below_since_s: float | None = None

    def observe(self, pressure: float) -> Step:
        """Move by the pressure as it is now, by one step at most. To be called once a second."""
        now_s = self._clock_s()
        self.pressure = pressure
        above = self.step < Step.REFUSE and pressure >= BOUNDS[Step(self.step + 1)].enter
        below = self.step > Step.NORMAL and pressure < BOUNDS[self.step].leave
        self._above_since_s = _since(self._above_since_s, now_s) if above else None
        self._below_since_s = _since(self._below_since_s, now_s) if below else None
        if self._above_since_s is not None and now_s - self._above_since_s >= self._rise_s:
            self._enter_step(Step(self.step + 1))
        elif self._below_since_s is not None and now_s - self._below_since_s >= self._fall_s:
            self._enter_step(Step(self.step - 1))
        return self.step

    def _enter_step(self, step: Step) -> None:
        self.step = step
        self.changes[step.label] += 1
        self._above_since_s = self._below_since_s = None

    def apply(
        self,
        request: ChatRequest,
        prompt_tokens: int,
        *,
        small: ModelCard | None = None,
        branch: BranchSummary = EMPTY_BRANCH,
        no_degrade: bool = False,
    ) -> Degraded:
        """The decision about a request of about `prompt_tokens` in the current step.

        `small` is the small model where it has room, `branch` the conversation before. `no_degrade`
        (`x-no-degrade`) has the request served as asked for, or refused, and nothing in between. An
        answer that is no use cut short keeps its length: with tools, a format, `min_tokens` or `ignore_eos`.
        """
        if no_degrade or self.step is Step.NORMAL:
            return Degraded(request.model, request.max_tokens)
        model, max_tokens = request.model, request.max_tokens
        measures = []
        longest = self._default_tokens if max_tokens is None else max_tokens
        if _may_be_cut(request) and longest > self._short_tokens:
            max_tokens = self._short_tokens
            measures.append(SHORT_OUTPUT)
        taker = small if self.step >= Step.SMALL and small is not None and small.id != model else None
        if taker is not None and unserved(taker, request, prompt_tokens, branch) is None:
            model = taker.id
            measures.append(SMALL_MODEL)
        self.requests_by_measure.update(measures)
        return Degraded(model, max_tokens, tuple(measures))

    def note_refusal(self) -> Mapping[str, str]:
        """Count a refusal by the full queue; returns its headers, none in the steps before."""
        if self.step is not Step.REFUSE:
            return {}
        self.requests_by_measure[REFUSED] += 1
        return {"x-degraded": REFUSED}


def degrade_of(settings: Settings) -> DegradedMode | None:
    """The mode as the settings have it; None where it is off."""
    if settings.degrade == "off":
        return None
    return DegradedMode(
        rise_s=settings.degrade_rise_s,
        fall_s=settings.degrade_fall_s,
        short_tokens=settings.degrade_short_tokens,
        default_tokens=settings.default_max_tokens or math.inf,
    )


def _since(since_s: float | None, now_s: float) -> float:
    return now_s if since_s is None else since_s


def _may_be_cut(request: ChatRequest) -> bool:
    body = request.body
    wanted = body.get("response_format")
    has_format = isinstance(wanted, dict) and wanted.get("type") not in (None, "text")
    forced = any(body.get(name) for name in ("tools", "min_tokens", "ignore_eos", "regex", "ebnf"))
    return not (has_format or forced)
