"""One choice: the states that it passes through, and the categories that halt it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from app.core import Counts, Delta
from app.safety.policies.policy import Policy
from app.safety.stream.answer_context import AnswerContext
from app.safety.stream.choice_screen import ChoiceScreen, ScreenSetup, StreamState
from app.safety.stream.span_reader import UNMATCHED
from app.safety.text.hard_list import HardList
from app.safety.verdict import Scores
from tests.support.policies import policy


class Scored:
    """A first stage that scores each delta as it is told to."""

    review_at = 0.5

    def __init__(self, *scores: float) -> None:
        self._scores = list(scores)

    def start(self, _prompt_harm: float) -> Scored:
        """See AnswerClassifier."""
        return self

    def feed(self, _text: str) -> float:
        """See ScoredAnswer."""
        return self._scores.pop(0)


def choice(scores: Sequence[float], rules: Policy | None = None) -> ChoiceScreen:
    """A choice of which the deltas have these scores."""
    setup = ScreenSetup(
        classifier=Scored(*scores),
        policy=rules or policy(),
        hard_list=HardList(["canary song"]),
        match=UNMATCHED,
        continued="",
        context=AnswerContext(),
        prompt_harm=0.0,
        watched=False,
        scores_wanted=False,
        on_held=lambda _seconds, _deltas: None,
        clock_s=lambda: 0.0,
    )
    return ChoiceScreen(setup)


def word(text: str, tokens: int) -> Delta:
    """A delta of one token."""
    return Delta(0, "text", text, (tokens,), Counts(1, tokens))


def reviewed(scores: Scores, rules: Policy) -> ChoiceScreen:
    """A choice that was reviewed with these scores."""
    one = choice([0.9, 0.9], rules)
    assert [one.read(word("a ", 1)), one.read(word("b ", 2))] == [StreamState.HELD, StreamState.REVIEW]
    one.take_scores(scores)
    return one


def test_a_choice_passes_through_its_states():
    """Clear, held in doubt, in review after two hits, held until it is released, and clear again."""
    one = choice([0.1, 0.4, 0.6, 0.7, 0.1])
    words = [word(text, at) for at, text in enumerate(("a ", "b ", "c ", "d ", "e "), start=1)]
    states = [one.read(delta) for delta in words[:4]]
    assert states == [StreamState.CLEAR, StreamState.HELD, StreamState.HELD, StreamState.REVIEW]
    assert one.take_scores({"S2": 0.1}) is one.state is StreamState.HELD
    assert one.release() == words[1:4]
    assert one.read(words[4]) is StreamState.CLEAR


def test_a_harmful_review_and_a_listed_span_halt():
    """With the verdict of the policy."""
    one = reviewed({"S2": 0.9}, policy())
    assert (one.state, one.verdict is not None and one.verdict.category) == (StreamState.HALTED, "S2")
    listed = choice([0.1])
    assert listed.read(word("canary song", 1)) is StreamState.HALTED
    assert listed.verdict is not None
    assert listed.verdict.stage == "hard_list"


@pytest.mark.parametrize(
    ("document", "scores", "halted_by"),
    [
        ({"mode": "observe"}, {"S2": 0.99}, None),
        ({"mode": "observe"}, {"S2": 0.99, "S4": 0.8}, "S4"),
        ({"categories": {"S2": {"action": "flag"}}}, {"S2": 0.99}, None),
        ({"categories": {"S2": {"action": "flag"}}}, {"S3": 0.99}, "S3"),
    ],
)
def test_only_a_category_that_acts_halts(document: dict[str, Any], scores: Scores, halted_by: str | None):
    """What is observed or flagged passes, and its scores are kept for the record."""
    one = reviewed(scores, policy(document))
    assert (one.verdict.category if one.verdict else None) == halted_by
    assert one.doubt.recordable_findings() == scores


def test_scores_that_no_policy_could_act_on_are_not_recorded():
    """They are below the score that a tenth of ordinary answers reach."""
    assert reviewed({"S2": 0.39}, policy()).doubt.recordable_findings() == {}
    assert reviewed({"S2": 0.4}, policy()).doubt.recordable_findings() == {"S2": 0.4}
