"""Verdicts: which is stricter, and how scores of several texts come together."""

from __future__ import annotations

import itertools
from dataclasses import replace

from app.safety.verdict import ACTIONS, Reading, ScreenFailed, Verdict, harm, highest, stricter
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


def observed(action, would, score: float = 0.5) -> Verdict:
    """A verdict that does this, and observes that."""
    return replace(verdict(action, score), observed=would)


def test_the_stricter_of_two_verdicts_keeps_what_either_observed():
    """What is done goes first; then what would be."""
    assert stricter(observed(None, "block", 0.9), observed(None, "watch", 0.5)).score == 0.9
    assert stricter(observed(None, "watch", 0.5), observed(None, "block", 0.9)).score == 0.9
    mixed = stricter(observed("watch", "watch", 0.6), observed(None, "block", 0.9))
    assert (mixed.action, mixed.observed, mixed.score, mixed.enforced) == ("watch", "block", 0.6, "block")
    assert stricter(verdict(None), observed(None, "flag")).enforced == "flag"


def test_the_stricter_of_two_verdicts_has_the_readings_of_both():
    """In order."""
    first, second = (replace(verdict(None), readings=[Reading("ngrams", {"S1": p})]) for p in (0.1, 0.2))
    assert [r.scores["S1"] for r in stricter(first, second).readings] == [0.1, 0.2]


def test_a_prompt_is_judged_by_all_its_readings():
    """By the strictest; one that can only watch watches where it would refuse."""
    rules = policy()
    calm, grave = Reading("encoder", {"S1": 0.1}), Reading("encoder", {"S2": 0.7})
    assert rules.judge([calm]).action is None
    assert rules.judge([calm, grave]).action == "block"
    assert rules.judge([grave, calm]).category == "S2"
    assert rules.judge([calm, grave._replace(texts=8)]).action == "watch"
    only = rules.judge([calm, grave._replace(watch_only=True)])
    assert (only.action, only.category, only.scores) == ("watch", "S2", {"S1": 0.1, "S2": 0.7})
    assert only.readings == [calm, grave._replace(watch_only=True)]
    assert rules.judge([calm, Reading("encoder", {"S2": 0.5}, watch_only=True)]).action is None
    assert rules.judge([grave, grave._replace(watch_only=True)]).action == "block"
    observing = policy({"mode": "observe"}).judge([calm, grave._replace(watch_only=True)])
    assert (observing.action, observing.observed) == (None, "watch")
