"""What is kept of an answer's scores, and what a policy that acts for some categories holds back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from app.core import Counts, Delta
from app.safety.policies.policy import Policy
from app.safety.screens.stream_screen import Screening, StreamScreen
from app.safety.verdict import Scores
from tests.support.policies import policy

FLOOR = 0.4
"""The score that a tenth of ordinary answers reach (tests/support/policies.py): from here on it is kept."""


class Told:
    """Hears what it is told: each piece of the answer has its scores, whatever it says."""

    def __init__(self, told: Sequence[Scores]) -> None:
        self._left = list(told)
        self._now: Scores = {}
        self.num_asked = 0

    def listen(self, _prior: float) -> Told:
        """See app.safety.screens.stream_terms.Listens."""
        return self

    def feed(self, _text: str) -> float:
        """See app.safety.screens.stream_terms.Listener."""
        self._now = self._left.pop(0)
        return max(self._now.values())

    def scores(self) -> Scores:
        """See app.safety.screens.stream_terms.Listener."""
        self.num_asked += 1
        return self._now


def screened(
    told: Sequence[Scores], rules: Policy | None = None, tokens: int = 1
) -> tuple[Screening, list[str]]:
    """An answer of as many deltas, and what came out after each."""
    model: Any = Told(told)
    screening = StreamScreen(model).for_request(1, False, 0.0, rules or policy())
    out = []
    for number in range(len(told)):
        counts = Counts(1, (number + 1) * tokens)
        released = screening.feed(Delta(0, "text", f"w{number} ", (number,), counts))
        out.append("".join(delta.text for delta in released))
    return screening, out


def of(*harms: float, category: str = "S2") -> list[Scores]:
    """Scores of one category."""
    return [{category: p} for p in harms]


@pytest.mark.parametrize(
    ("harms", "peak"),
    [
        ((0.1, 0.2), None),
        ((0.1, 0.6, 0.1), None),
        ((0.5, 0.6, 0.1), 0.5),
        ((0.6, 0.5, 0.1), 0.5),
        ((0.5, 0.6, 0.1, 0.45, 0.46), 0.5),
        ((0.45, 0.46, 0.42, 0.55, 0.65), 0.55),
        ((0.1, 0.4, 0.4), 0.4),
    ],
)
def test_the_peak_is_what_two_tokens_in_a_row_have_reached(harms: tuple[float, ...], peak: float | None):
    """The most of it, where any policy could make something of that: it is what halts."""
    screening, _ = screened(of(*harms))
    assert screening.peaks() == [{} if peak is None else {"S2": peak}]


def test_several_tokens_at_once_are_two_in_a_row():
    """The model gives what two in a row have reached."""
    screening, _ = screened(of(0.1, 0.6), tokens=2)
    assert screening.peaks() == [{"S2": 0.6}]


def test_the_peak_of_a_halted_answer_has_halted_it():
    """It ends there."""
    screening, _ = screened(of(0.5, 0.8, 0.9, 0.99))
    assert screening.halted is not None
    assert screening.peaks() == [{"S2": 0.8}]
    assert policy().judge_output(screening.peaks()[0], watched=False).blocked


def test_what_is_only_observed_is_not_held_back():
    """Of an answer that would have been halted every token goes out as it comes."""
    screening, out = screened(of(*[0.99] * 6), policy({"mode": "observe"}))
    assert screening.halted is None
    assert out == [f"w{number} " for number in range(6)]
    assert screening.peaks() == [{"S2": 0.99}]


def test_what_acts_all_the_same_is_held_back_and_halted():
    """In an observing policy the category that is locked, whatever else there is."""
    rules = policy({"mode": "observe"})
    _, doubted = screened([{"S2": 0.99, "S4": 0.5}] * 3, rules)
    assert doubted == ["", "", ""]
    halted, _ = screened([{"S2": 0.99, "S4": 0.8}] * 3, rules)
    assert halted.halted is not None
    assert halted.halted.category == "S4"


def test_a_category_that_is_flagged_holds_nothing_back():
    """Nothing could be halted for it."""
    rules = policy({"categories": {"S2": {"action": "flag"}}})
    assert screened(of(0.99, 0.99), rules)[1] == ["w0 ", "w1 "]
    assert screened(of(0.5, 0.5, category="S3"), rules)[1] == ["", ""]


def test_scores_are_asked_for_where_they_may_be_a_new_peak():
    """They cost more than the harm: below the peak, and below every policy, nobody needs them."""
    model = Told(of(0.1, 0.2, 0.5, 0.6, 0.45, 0.3, 0.39))
    untyped: Any = model
    screening = StreamScreen(untyped).for_request(1, False, 0.0, policy())
    for number in range(7):
        screening.feed(Delta(0, "text", "w ", (number,), Counts(1, number + 1)))
    assert model.num_asked == 2
