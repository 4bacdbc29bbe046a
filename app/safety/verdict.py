"""The results of screens: scores by category, and the verdict that a policy makes of them.

The vocabulary of every stage. A verdict has no text in it and may be stored and logged as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, get_args

from app.errors import SafetyUnavailable

Scores = Mapping[str, float]
"""Category to calibrated probability, 0 to 1, on one scale over all categories."""


class NgramResult(NamedTuple):
    """The n-grams' harm of a text, and a function for the scores, of which it is the maximum.

    If `is_language` is false, the n-grams do not know the language, as of digits: a low harm is no evidence.
    """

    harm: float
    scores: Callable[[], Scores]
    is_language: bool = True


Action = Literal["block", "watch", "flag", "off"]
"""The act at a category's threshold: refuse or halt; admit under stricter terms; record; nothing."""

Stage = Literal["ngrams", "encoder", "guard", "stream", "hard_list"]
"""The source of the scores."""

ACTIONS: tuple[Action, ...] = get_args(Action)
"""From the strictest down."""
STAGES: tuple[Stage, ...] = get_args(Stage)


class Reading(NamedTuple):
    """The scores that a stage gave to something in a prompt, or to an answer.

    `texts` is the number of slices of which they are the maximum. With `watch_only` the prompt is watched
    where the scores would refuse a user's turn, without another effect.
    """

    stage: Stage
    scores: Scores
    texts: int = 1
    watch_only: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """The decision on a prompt or an answer. `action` is None where no threshold was reached.

    `category` is the one that decided, or without an action the highest; `score` is its score and
    `threshold` the one it was held against. A text of which nothing but its harm was asked has no category
    and no scores, and its harm for a score. `lag_tokens` is how many tokens of an answer there
    were after the one that reached it. `unread` is one of a failed screen that failed open.

    `observed` is the action that an observing policy would have taken, had it been enforced; `action` is
    what is done all the same. `observed_category` decided `observed` where another one decided `action`.
    `readings` are what a verdict on a prompt was made of (`judged`). `lifted` is the category whose refusal
    the operator's `allow` took back.
    """

    action: Action | None
    category: str | None
    score: float
    threshold: float
    stage: Stage
    policy_hash: str
    scores: Scores = field(default_factory=dict)
    lag_tokens: int = 0
    unread: bool = False
    observed: Action | None = None
    observed_category: str | None = None
    readings: Sequence[Reading] = ()
    lifted: str | None = None

    @property
    def enforced(self) -> Action | None:
        """The action of the policy where it is enforced."""
        return max(self.action, self.observed, key=_severity)

    @property
    def enforced_category(self) -> str | None:
        """The category that decided `enforced`."""
        return self.category if self.action == self.enforced else self.observed_category or self.category

    @property
    def harm(self) -> float:
        """The highest of all scores."""
        return max(self.score, harm(self.scores))

    @property
    def blocked(self) -> bool:
        """True if the prompt is refused, or the answer halted."""
        return self.action == "block"

    @property
    def watched(self) -> bool:
        """True if the request continues under stricter terms."""
        return self.action == "watch"


_STATE = ("action", "category", "score", "threshold", "stage", "policy_hash", "scores", "unread", "observed")


def as_state(verdict: Verdict) -> dict[str, Any]:
    """A verdict as JSON, for an answer that another process continues; without its readings."""
    fields = {name: getattr(verdict, name) for name in _STATE}
    return fields | {"threshold": verdict.threshold if math.isfinite(verdict.threshold) else None}


def from_state(state: Mapping[str, Any]) -> Verdict:
    """The verdict that `as_state` wrote. Raises KeyError, TypeError for another version's."""
    threshold = state["threshold"]
    return Verdict(**{**state, "threshold": math.inf if threshold is None else threshold})


class ScreenFailed(SafetyUnavailable):
    """A screen threw, or took too long, and `safety_fail_open` is not set."""

    text = "A safety screen failed or took too long, so this was not answered; send it again."

    def __init__(self) -> None:
        super().__init__(self.text)


class ScreenBusy(ScreenFailed):
    """A screen has more to read than it can, whatever `safety_fail_open` says."""

    text = "The safety screens are overloaded, so this was not answered; send it again later."
    default_retry_after_s = 30


def stricter(first: Verdict, second: Verdict) -> Verdict:
    """The verdict that does more, or would do more; of two that do the same, the second, which knows more.

    It has the readings of both.
    """
    chosen = first if _severities(first) > _severities(second) else second
    observing = max(second, first, key=lambda verdict: _severity(verdict.observed))
    readings = (*first.readings, *second.readings)
    if observing.observed == chosen.observed and len(readings) == len(chosen.readings):
        return chosen
    category = chosen.observed_category
    if observing.observed != chosen.observed:
        category = observing.observed_category or observing.category
    return replace(chosen, observed=observing.observed, observed_category=category, readings=readings)


def _severities(verdict: Verdict) -> tuple[int, int]:
    return _severity(verdict.action), _severity(verdict.observed)


def _severity(action: Action | None) -> int:
    return 0 if action is None else len(ACTIONS) - ACTIONS.index(action)


def checked(scores: Scores) -> Scores:
    """The scores of a classifier. Raises ValueError for none, and for NaN, which would reach no threshold."""
    if not scores or not all(0.0 <= p <= 1.0 for p in scores.values()):
        raise ValueError("scores out of range")
    return scores


def harm(scores: Scores) -> float:
    """The highest score of a text; 0 without scores."""
    return max(scores.values(), default=0.0)


def highest(*several: Scores) -> Scores:
    """The maximum of each category over several texts or models."""
    merged: dict[str, float] = {}
    for scores in several:
        for category, p in scores.items():
            if p > merged.get(category, -1.0):
                merged[category] = p
    return merged
