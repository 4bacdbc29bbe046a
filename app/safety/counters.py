"""Counts of the screens since the start, for the metrics: plain numbers, no text."""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Literal, get_args

from app.core import Observes
from app.safety.verdict import STAGES, Stage, Verdict

Failure = Literal["error", "timeout"]
HOLD_BACK_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0)
"""Bounds of the histogram of hold-back, in seconds."""


class SafetyCounters:
    """Verdicts, failures, and the tokens that the stream screen held back or released too early."""

    def __init__(self, hold_back: Observes) -> None:
        self.verdicts: dict[str, dict[str, Counter[str]]] = {stage: defaultdict(Counter) for stage in STAGES}
        """By stage, category and action; `none` and `pass` where no threshold was reached."""
        self.observed: dict[str, dict[str, Counter[str]]] = {stage: defaultdict(Counter) for stage in STAGES}
        """By stage, category and action: what observing policies would have done."""
        self.failures: dict[str, dict[str, Counter[str]]] = {
            stage: {why: Counter(refused=0, passed=0) for why in get_args(Failure)} for stage in STAGES
        }
        """By stage, `error` or `timeout`, `refused` or `passed`; from 0 on: an alert must see the first."""
        self.lifted: Counter[str] = Counter()
        """By category: refusals of prompts that the operator's `allow` lifted."""
        self.hold_back = hold_back
        """Seconds from the arrival of a delta until its release."""
        self.examined_answers = 0
        """Reviews of answers by the second stage: flagged ones, and those to watched prompts."""
        self.leaked_tokens = 0
        """Tokens of halted answers that were released after the one where the harm began, as screened."""
        self.dropped_tokens = 0
        """Tokens of halted answers that were held back and never released."""

    def judged(self, verdict: Verdict) -> None:
        """Count a verdict, also one that passes."""
        category = verdict.category if verdict.action else None
        self.verdicts[verdict.stage][category or "none"][verdict.action or "pass"] += 1

    def would_act(self, verdict: Verdict) -> None:
        """Count what an observing policy would have done, if it did not do as much."""
        if verdict.enforced is not None and verdict.enforced != verdict.action:
            self.observed[verdict.stage][verdict.category or "none"][verdict.enforced] += 1

    def failed(self, stage: Stage, why: Failure, *, passed: bool) -> None:
        """Count a screen that failed or took too long; `passed` where it failed open."""
        self.failures[stage][why]["passed" if passed else "refused"] += 1

    def examined(self) -> None:
        """Count an examination of an answer."""
        self.examined_answers += 1

    def halted(self, *, leaked_tokens: int, dropped_tokens: int) -> None:
        """Count the tokens of a halted answer."""
        self.leaked_tokens += leaked_tokens
        self.dropped_tokens += dropped_tokens
