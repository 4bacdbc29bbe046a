"""A policy that observes: what it says, what it does all the same, and the levels of keys."""

from __future__ import annotations

import pytest

from app.core import SAFETY_LEVELS
from app.safety.categories import CATEGORIES, LOCKED
from app.safety.policies.policy import Policies
from app.safety.policies.policy_file import PolicyError, Rule
from app.safety.policies.policy_prompt import STRICT
from tests.support.policies import policy, write_models

OBSERVE = {"mode": "observe"}


def test_it_says_what_it_would_do_and_does_nothing():
    """By which category, at which score and threshold: all but the action is as if it were enforced."""
    rules = policy(OBSERVE)
    verdict = rules.judge_prompt({"S2": 0.7}, "encoder")
    enforced = policy().judge_prompt({"S2": 0.7}, "encoder")
    assert (verdict.action, verdict.observed, verdict.enforced) == (None, "block", "block")
    assert (verdict.category, verdict.score, verdict.threshold) == ("S2", 0.7, enforced.threshold)
    assert not verdict.blocked
    assert not verdict.watched
    answer = rules.judge_output({"S2": 0.9}, watched=False)
    assert (answer.action, answer.observed) == (None, "block")


@pytest.mark.parametrize("category", sorted(LOCKED))
def test_a_locked_category_acts_all_the_same(category: str):
    """Whatever else there is in the text; the verdict names it."""
    rules = policy(OBSERVE)
    verdict = rules.judge_prompt({"S2": 0.99, category: 0.7}, "encoder")
    assert (verdict.action, verdict.category, verdict.observed) == ("block", category, "block")
    watched = rules.judge_prompt({"S2": 0.99, category: 0.5}, "encoder")
    assert (watched.action, watched.category, watched.observed) == ("watch", category, "block")
    assert (watched.observed_category, watched.enforced_category) == ("S2", "S2")
    assert rules.judge_output({category: 0.9}, watched=False).blocked


def test_only_locked_categories_halt_an_answer():
    """Others are only observed. The hard list halts as ever."""
    rules = policy({**OBSERVE, "hard_list": ["x"]})
    halting = {c for c in CATEGORIES if rules.judge_output({c: 1.0}, watched=False).blocked}
    assert halting == LOCKED
    assert rules.halted().blocked


def test_what_a_policy_gives_up_is_named():
    """Each loss with its categories; the built-in policy and a stricter one give up nothing."""
    assert policy().weakened() == policy({"block_fpr": 0.02}).weakened() == []
    tables = {"S9": {"action": "watch"}, "S6": {"action": "watch"}, "S10": {"block_fpr": 0.001}}
    assert policy({"categories": tables}).weakened() == [
        "action watch: dangerous specialized advice, indiscriminate weapons",
        "block_fpr 0.001: hate",
    ]
    (loss,) = policy(OBSERVE).weakened()
    assert loss.startswith("observed only: violent crimes, ")
    assert "indiscriminate weapons" in loss
    assert "child" not in loss


def test_a_conversation_with_a_refused_turn_is_watched():
    """The turn was of a locked category; the policy goes on observing."""
    rules = policy(OBSERVE).after(1)
    verdict = rules.judge_prompt({"S2": 0.7}, "encoder")
    assert (verdict.action, verdict.observed) == ("watch", "block")
    assert policy(OBSERVE).after(3).observing


def test_the_levels_of_keys():
    """Only `observe` is looser than the policy; `standard` is the policy itself."""
    for document in ({}, OBSERVE):
        rules = policy(document)
        assert rules.at_level("standard") is rules.at_level(None) is rules
        observing = {level: rules.at_level(level).observing for level in SAFETY_LEVELS}
        assert observing == {
            "observe": True,
            "standard": bool(document),
            "enforce": False,
            "strict": False,
        }
        assert rules.at_level("strict").strict
        assert not rules.at_level("enforce").strict
        assert rules.enforced is rules.at_level("enforce")
        assert rules.at_level("observe").at_level("observe") is rules.at_level("observe")


def test_a_text_that_is_let_pass_by_one_level_is_not_known_to_another():
    """The memory of judged texts goes by the hash: each mode has its own, and an enforced one has the old."""
    observing, enforced = policy(OBSERVE), policy()
    assert observing.hash != enforced.hash
    assert observing.enforced.hash == enforced.hash
    assert enforced.at_level("observe").hash == observing.hash


def test_the_strict_text_is_for_strict_keys_alone():
    """Nothing that is only observed makes the model strict."""
    assert policy(OBSERVE).alignment(watched=False) is None
    assert policy(OBSERVE).at_level("strict").alignment(watched=False) == STRICT


def test_the_setting_makes_any_policy_observe(tmp_path):
    """After a reload too."""
    path, models = tmp_path / "policy.toml", write_models(tmp_path / "models")
    path.write_text('mode = "enforce"\nblock_fpr = 0.02')
    policies = Policies(path, models, observe=True)
    assert policies.current.observing
    assert policies.reload().observing
    assert not Policies(path, models).current.observing


def test_another_mode_is_refused_by_name():
    """With what there is."""
    with pytest.raises(PolicyError, match=r"mode.*enforce.*observe"):
        policy({"mode": "dry-run"})
    with pytest.raises(PolicyError, match=r"images.*allow.*refuse"):
        policy({"images": "screen"})


def test_a_target_takes_the_place_of_the_rates():
    """For refusing and halting; what is watched follows where it would be stricter than what is refused."""
    rules = policy({"categories": {"S6": {"action": "flag"}}}).at_rate(0.001)
    assert rules.judge_prompt({"S2": 0.89}, "encoder").action == "watch"
    assert rules.judge_prompt({"S2": 0.9}, "encoder").action == "block"
    assert rules.judge_prompt({"S6": 0.9}, "encoder").action == "flag"
    assert rules.judge_output({"S2": 0.94}, watched=False).action is None
    assert policy().at_rate(0.1).judge_prompt({"S2": 0.3}, "encoder").action == "block"


def test_a_target_does_not_loosen_a_locked_category():
    """It keeps the built-in rates at least."""
    for category in LOCKED:
        assert Rule().at_rate(0.001, category) == Rule()
        assert policy().at_rate(0.0001).judge_prompt({category: 0.6}, "encoder").action == "block"


def test_an_observing_policy_is_enforced_at_a_target():
    """For the question what it would have refused."""
    assert policy(OBSERVE).at_rate(0.01).judge_prompt({"S2": 0.7}, "encoder").action == "block"


def test_the_policy_is_shown_with_its_mode():
    """And a hash for each level of a key."""
    shown = policy({**OBSERVE, "images": "refuse"}).as_json()
    assert (shown["mode"], shown["images"]) == ("observe", "refuse")
    assert list(shown["level_hashes"]) == list(SAFETY_LEVELS)
    assert shown["level_hashes"]["strict"] == shown["strict_hash"]
    assert (policy().as_json()["mode"], policy().as_json()["images"]) == ("enforce", "allow")
    assert policy({"images": "refuse"}).hash != policy().hash
