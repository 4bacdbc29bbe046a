"""What one request's answer is screened by: the policy's rules, a model's ear, and how long tokens wait."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from app.safety.hard_list import HardList
from app.safety.verdict import Scores, Verdict


class HoldBack(NamedTuple):
    """How many tokens are held back while the model is in no doubt, and up to how many more if it is.

    The same of watched prompts.
    """

    clean: int = 0
    grey: int = 80
    watched: int = 80
    watched_grey: int = 160


class Listener(Protocol):
    """A text that is scored while it grows (app.safety.output_model)."""

    def feed(self, text: str) -> float:
        """How harmful the text is now that this has come: the maximum of its scores."""
        ...

    def scores(self) -> Scores:
        """The scores as of now."""
        ...


class Listens(Protocol):
    """A model of answers."""

    def listen(self, prior: float) -> Listener:
        """A new text, to a prompt of this harm."""
        ...


class Rules(Protocol):
    """A policy in force, as answers meet it (app.safety.policy.Policy)."""

    hard_list: Sequence[str]

    def output_thresholds(self, *, watched: bool) -> Sequence[float]:
        """The scores at which categories halt an answer."""
        ...

    def clear_output(self, harm: float, *, watched: bool) -> Verdict | None:
        """The verdict on an answer of this harm, where no category can do anything; None where one may."""
        ...

    def judge_output(self, scores: Scores, *, watched: bool) -> Verdict:
        """What becomes of an answer with these scores."""
        ...

    def halted(self, *, lag_tokens: int = 0) -> Verdict:
        """The verdict on an answer that has a span of the hard list."""
        ...


@dataclass(frozen=True, slots=True)
class Terms:
    """What all choices of a request are screened by; `clean` and `grey` are its hold-back.

    A harm of `floor` may halt, one of `doubt` is the first of which the model is in doubt.
    """

    model: Listens | None
    hard_list: HardList | None
    policy: Rules
    prior: float
    watched: bool
    floor: float
    doubt: float
    clean: int
    grey: int
    held_s: Callable[[float], None]
    clock_s: Callable[[], float]
