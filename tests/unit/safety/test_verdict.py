"""Verdicts: which is stricter, and how scores of several texts come together."""

from __future__ import annotations

import itertools

from app.safety.verdict import ACTIONS, ScreenFailed, Verdict, harm, highest, stricter
from tests.support.policies import policy


def verdict(action, score: float = 0.5) -> Verdict:
    """A verdict that does this."""
    return Verdict(action, "S1", score, 0.5, "encoder", "hash")


def test_the_stricter_verdict_does_more():
    """Block, watch, flag, nothing; of two that do the same, the second."""
    order = [*(action for action in ACTIONS if action != "off"), None]
    for first, second in itertools.combinations(order, 2):
        assert stricter(verdict(first), verdict(second)).action == first
        assert stricter(verdict(second), verdict(first)).action == first
    assert stricter(verdict("watch", 0.6), verdict("watch", 0.7)).score == 0.7


def test_what_a_verdict_means():
    """Blocked or watched, or neither."""
    assert (verdict("block").blocked, verdict("block").watched) == (True, False)
    assert (verdict("watch").blocked, verdict("watch").watched) == (False, True)
    assert (verdict("flag").blocked, verdict(None).watched) == (False, False)


def test_the_highest_of_several_scores():
    """Of each category; the highest of all is the harm."""
    scores = highest({"S1": 0.1, "S2": 0.9}, {}, {"S1": 0.3, "S4": 0.0})
    assert scores == {"S1": 0.3, "S2": 0.9, "S4": 0.0}
    assert (harm(scores), harm({})) == (0.9, 0.0)


def test_a_failed_screen_says_nothing_of_the_text():
    """Its message is always the same."""
    assert str(ScreenFailed()) == str(ScreenFailed())
    assert ScreenFailed().code == "safety_unavailable"


def test_a_policy_judges():
    """A policy's verdicts carry its hash."""
    rules = policy()
    assert rules.judge_prompt({"S1": 0.1}, "ngrams").policy_hash == rules.hash
