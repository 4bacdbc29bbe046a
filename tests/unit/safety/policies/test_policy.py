"""The policy: what becomes of scores, for whom, and that no relative of a policy is looser."""

from __future__ import annotations

from typing import Any

import pytest

from app.safety.categories import CATEGORIES
from app.safety.policies.calibration import CalibrationDamaged
from app.safety.policies.policy import Policies
from app.safety.policies.policy_file import PolicyError
from app.safety.policies.policy_prompt import NORMAL, STRICT
from tests.support.policies import PROMPTS, policy, write_models


def test_a_category_blocks_watches_or_lets_pass_by_its_score():
    """By the highest; the verdict says which category, its score, the threshold and the policy."""
    rules = policy()
    blocked = rules.judge_prompt({"S1": 0.1, "S2": 0.6}, "encoder")
    assert (blocked.action, blocked.category, blocked.score) == ("block", "S2", 0.6)
    assert blocked.threshold == pytest.approx(PROMPTS[0.002])
    assert (blocked.blocked, blocked.policy_hash, blocked.stage) == (True, rules.hash, "encoder")
    watched = rules.judge_prompt({"S1": 0.1, "S2": 0.5}, "encoder")
    assert (watched.action, watched.category) == ("watch", "S2")
    assert watched.threshold == pytest.approx(PROMPTS[0.05])
    passed = rules.judge_prompt({"S1": 0.1, "S2": 0.3}, "encoder")
    assert (passed.action, passed.category, passed.score) == (None, "S2", 0.3)


def test_without_scores_nothing_is_decided():
    """A prompt without text is let pass."""
    assert policy().judge_prompt({}, "ngrams").action is None


@pytest.mark.parametrize(
    ("action", "expected"), [("block", "block"), ("watch", "watch"), ("flag", "flag"), ("off", None)]
)
def test_each_action_does_its_own(action, expected):
    """What is flagged is recorded and let through, what is off is not even recorded."""
    rules = policy({"categories": {"S2": {"action": action}}})
    assert rules.judge_prompt({"S2": 0.99}, "encoder").action == expected


def test_the_strictest_of_several_categories_decides():
    """A category that blocks goes before one that watches, however high that one is."""
    rules = policy({"categories": {"S2": {"action": "flag"}, "S3": {"action": "watch"}}})
    verdict = rules.judge_prompt({"S1": 0.61, "S2": 0.99, "S3": 0.98}, "encoder")
    assert (verdict.action, verdict.category) == ("block", "S1")
    assert rules.judge_prompt({"S2": 0.99, "S3": 0.98}, "encoder").action == "watch"
    furthest = rules.judge_prompt({"S1": 0.7, "S5": 0.8, "S6": 0.75}, "encoder")
    assert furthest.category == "S5"


def test_the_ngrams_watch_only_where_they_are_surer():
    """They spend a fifth of the watch rate: the encoder has the rest."""
    rules = policy()
    assert rules.judge_prompt({"S1": 0.79}, "ngrams").action is None
    watched = rules.judge_prompt({"S1": 0.8}, "ngrams")
    assert (watched.action, watched.category, watched.threshold) == ("watch", "S1", pytest.approx(0.8))


def test_the_ngrams_refuse_nothing():
    """However sure they are, of whatever category and however strict the policy: they watch."""
    rules = policy()
    for relative in (rules, rules.at_level("strict"), rules.after(3), rules.at_rate(0.1)):
        for category in CATEGORIES:
            assert relative.judge_prompt({category: 1.0}, "ngrams").action == "watch"
            assert relative.blocked({category: 1.0}, "ngrams") == ()
    observing = policy({"mode": "observe"})
    seen = observing.judge_prompt({"S1": 1.0}, "ngrams")
    assert (seen.action, seen.observed) == (None, "watch")
    assert observing.judge_prompt({"S4": 1.0}, "ngrams").action == "watch"


def test_the_ngrams_record_what_is_flagged():
    """At the block rate: what is flagged is neither refused nor watched."""
    rules = policy({"block_fpr": 0.01, "action": "flag"})
    assert rules.judge_prompt({"S1": 0.79}, "ngrams").action is None
    assert rules.judge_prompt({"S1": 0.8}, "ngrams").action == "flag"
    assert policy({"action": "watch"}).judge_prompt({"S1": 1.0}, "ngrams").action == "watch"
    assert policy({"action": "off"}).judge_prompt({"S1": 1.0}, "ngrams").action is None


def test_each_of_many_texts_is_held_to_its_share():
    """The maximum over many slices has to be higher than that over one."""
    rules = policy()
    assert rules.judge_prompt({"S1": 0.7}, "encoder").action == "block"
    assert rules.judge_prompt({"S1": 0.7}, "encoder", texts=8).action == "watch"
    assert rules.judge_prompt({"S1": 0.9}, "encoder", texts=10_000).action == "block"


def test_a_guard_is_held_to_its_own_scale():
    """Its probability has no calibration of ours: half blocks, a quarter watches, or blocks strictly."""
    rules = policy()
    assert [rules.judge_prompt({"S1": p}, "guard").action for p in (0.5, 0.3, 0.2)] == [
        "block",
        "watch",
        None,
    ]
    assert rules.at_level("strict").judge_prompt({"S1": 0.3}, "guard").action == "block"


def test_answers_to_watched_prompts_are_halted_sooner():
    """The same score halts the one answer and not the other."""
    rules = policy()
    assert rules.judge_output({"S1": 0.55}, watched=False).action is None
    assert rules.judge_output({"S1": 0.55}, watched=True).action == "block"
    assert rules.judge_output({"S1": 0.65}, watched=False).stage == "stream"


@pytest.mark.parametrize("document", [{}, {"action": "flag"}, {"categories": {"S1": {"action": "off"}}}])
def test_what_is_clear_is_what_no_category_does_anything_about(document: dict[str, Any]):
    """Of prompts, at every harm, in whichever category it is."""
    for rules in (policy(document), policy(document).at_level("strict")):
        for p in (x / 50 for x in range(51)):
            acts = any(rules.judge_prompt({c: p}, "ngrams").action for c in CATEGORIES)
            assert (rules.clear_prompt(p, "ngrams") is None) is acts


def test_no_prompt_is_clear_after_a_blocked_turn():
    """All are watched then."""
    assert policy().after(1).clear_prompt(0.0, "ngrams") is None


def test_a_watched_category_halts_answers_of_watched_prompts_only():
    """Elsewhere it is recorded, as is what is flagged; what is off is not."""
    rules = policy(
        {"categories": {"S1": {"action": "watch"}, "S2": {"action": "flag"}, "S3": {"action": "off"}}}
    )
    found = [rules.judge_output({"S1": 0.9}, watched=watched).action for watched in (False, True)]
    assert found == ["flag", "block"]
    assert rules.judge_output({"S2": 0.9}, watched=True).action == "flag"
    assert rules.judge_output({"S3": 0.9}, watched=True).action is None
    assert not rules.judge_output(dict.fromkeys(("S1", "S2", "S3"), 1.0), watched=False).blocked


def test_a_hard_listed_span_halts_whatever_the_scores():
    """Its verdict has no category."""
    verdict = policy({"hard_list": ["x"]}).halted()
    assert (verdict.action, verdict.category, verdict.stage) == ("block", None, "hard_list")


def test_a_strict_key_blocks_what_would_be_watched_by_policy():
    """The strict relative blocks at the watch threshold; a standard key has the policy itself."""
    rules = policy()
    strict = rules.at_level("strict")
    assert strict.judge_prompt({"S1": 0.5}, "encoder").action == "block"
    assert strict.hash != rules.hash
    assert rules.at_level("standard") is rules.at_level(None) is rules
    assert strict.at_level("standard") is strict


def test_strikes_make_a_conversation_stricter():
    """After one blocked turn all is watched, after three it is judged strictly; never looser."""
    rules = policy()
    assert rules.after(0) is rules
    watching = rules.after(1)
    verdict = watching.judge_prompt({"S1": 0.01}, "encoder")
    assert (verdict.action, verdict.category) == ("watch", None)
    assert watching.judge_prompt({"S1": 0.5}, "encoder").category == "S1"
    assert rules.after(3).judge_prompt({"S1": 0.5}, "encoder").action == "block"
    assert rules.at_level("strict").after(1).strict


def test_no_relative_is_looser():
    """Whatever is blocked or watched stays so for strict keys and after strikes."""
    order = [None, "flag", "watch", "block"]
    rules = policy({"categories": {"S2": {"action": "flag"}, "S3": {"action": "watch"}}})
    relatives = [
        rules.at_level("strict"),
        rules.after(1),
        rules.after(3),
        rules.at_level("strict").after(5),
    ]
    for relative in relatives:
        for category in CATEGORIES:
            for step in range(101):
                scores = {category: step / 100}
                before, after = (p.judge_prompt(scores, "encoder").action for p in (rules, relative))
                assert order.index(after) >= order.index(before)


def test_the_model_is_told_by_mode():
    """By default with watched prompts, and then the strict text; always for a strict key."""
    assert policy().alignment(watched=False) is None
    assert policy().alignment(watched=True) == STRICT
    assert policy().at_level("strict").alignment(watched=False) == STRICT
    assert policy({"alignment": {"mode": "always"}}).alignment(watched=False) == NORMAL
    assert policy({"alignment": {"mode": "off"}}).alignment(watched=True) is None


def test_the_hash_is_of_all_that_decides():
    """The same policy has the same hash; a rule, a text, a span or a message makes it another."""
    changes = [
        {},
        {"block_fpr": 0.02},
        {"hard_list": ["x"]},
        {"alignment": {"mode": "off"}},
        {"messages": {"S1": "no"}},
        {"categories": {"S2": {"action": "flag"}}},
    ]
    assert len({policy(change).hash for change in changes}) == len(changes)
    assert policy().hash == policy().hash
    assert len(policy().hash) == 16


def test_the_hard_list_is_shown_as_a_number():
    """Neither the policy's JSON nor its hash tells a span."""
    shown = policy({"hard_list": ["Project Xylophone"]}).as_json()
    assert shown["hard_list"] == 1
    assert "Xylophone" not in str(shown)
    assert shown["categories"]["S4"] | {"thresholds": None} == {
        "name": "child_exploitation",
        "locked": True,
        "action": "block",
        "block_fpr": 0.002,
        "watch_fpr": 0.05,
        "answer_fpr": 0.002,
        "watched_answer_fpr": 0.02,
        "thresholds": None,
    }
    assert shown["categories"]["S4"]["thresholds"]["block"] == 0.6


def test_which_categories_would_block():
    """All of them, for those who want to know more than the one that decided."""
    rules = policy({"categories": {"S2": {"action": "watch"}}})
    assert rules.blocked({"S1": 0.7, "S2": 0.9, "S3": 0.65, "S5": 0.2}, "encoder") == ("S1", "S3")


def test_a_reload_takes_the_file_as_it_is_now(tmp_path):
    """Another policy is in force; a file that is wrong leaves the one before, and says why."""
    path, models = tmp_path / "policy.toml", write_models(tmp_path / "models")
    path.write_text("block_fpr = 0.02")
    policies = Policies(path, models)
    first = policies.current
    path.write_text("block_fpr = 0.03")
    assert policies.current is first
    second = policies.reload()
    assert policies.current is second
    assert second.hash != first.hash
    path.write_text("block_fpr = 3")
    with pytest.raises(PolicyError):
        policies.reload()
    assert policies.current is second


def test_nothing_starts_without_a_calibration(tmp_path):
    """Without the table there are no thresholds."""
    with pytest.raises(CalibrationDamaged):
        Policies(None, tmp_path)


@pytest.mark.parametrize("country", ["USA", "1", "ü1", "U-"])
def test_a_country_has_two_letters(tmp_path, country):
    """Anything else is a mistake; a country without a line of ours is none."""
    models = write_models(tmp_path)
    Policies(None, models, "zz")
    with pytest.raises(PolicyError, match="safety_country"):
        Policies(None, models, country)


@pytest.mark.parametrize(("p", "doubtful"), [(0.49, False), (0.66, True)])
def test_a_prompt_is_in_doubt_where_the_ngrams_would_spend_the_whole_watch_rate(p: float, *, doubtful: bool):
    """The model is told to be strict then, though the n-grams alone watch less."""
    rules = policy()
    assert rules.is_uncertain({"S2": p}) is doubtful
    assert not rules.judge_prompt({"S2": p}, "ngrams").watched


@pytest.mark.parametrize("contact", ["two\nlines", "x" * 201])
def test_a_contact_is_one_short_line(tmp_path, contact):
    """It stands in messages to people; an address or a URL is taken, and named."""
    models = write_models(tmp_path)
    rules = Policies(None, models, contact="desk@example.org").current
    assert "contact desk@example.org." in rules.notice(rules.halted())
    with pytest.raises(PolicyError, match="safety_contact"):
        Policies(None, models, contact=contact)
