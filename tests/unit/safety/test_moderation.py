"""Verdicts in OpenAI's shape: keys, scores, flags, and the `moderation` object of chat."""

from __future__ import annotations

from typing import Any

import pytest

from app.errors import ContentFiltered
from app.safety import moderation
from app.safety.categories import CATEGORIES, OPENAI_KEYS
from app.safety.verdict import Verdict, harm


def verdict(action: Any, category: str | None, **scores: float) -> Verdict:
    """A verdict of the encoder with these scores."""
    return Verdict(action, category, scores.get(category or "", 0.0), 0.5, "encoder", "hash", scores)


def test_the_keys_are_openais_and_the_names_of_what_it_has_no_key_for() -> None:
    """All thirteen keys of OpenAI's come first, our own ones after them."""
    assert moderation.ALL_KEYS[: len(OPENAI_KEYS)] == OPENAI_KEYS
    assert moderation.ALL_KEYS[len(OPENAI_KEYS) :] == (
        "specialized_advice",
        "privacy",
        "intellectual_property",
        "elections",
        "jailbreak",
    )


@pytest.mark.parametrize("category", CATEGORIES)
def test_the_highest_category_score_is_the_harm_score(category: str) -> None:
    """No category's score is lost on the way into OpenAI's keys."""
    scores = dict.fromkeys(CATEGORIES, 0.125) | {category: 0.75}
    by_key = moderation.category_scores(scores)
    assert max(by_key.values()) == harm(scores) == 0.75


def test_a_key_has_the_highest_of_its_categories() -> None:
    """`sexual` says both sex crimes and sexual content."""
    assert moderation.category_scores({"S3": 0.25, "S12": 0.5})["sexual"] == 0.5
    assert moderation.category_scores({"S3": 0.75, "S12": 0.5})["sexual"] == 0.75


def test_blocked_is_flagged_and_watched() -> None:
    """What would be blocked is over both thresholds, and its keys are true."""
    result = moderation.result(verdict("block", "S9", S9=0.9))
    assert (result["flagged"], result["watched"]) == (True, True)
    assert [key for key, over in result["categories"].items() if over] == ["illicit/violent"]


def test_watched_is_not_flagged() -> None:
    """The lower threshold alone makes no category true."""
    result = moderation.result(verdict("watch", "S2", S2=0.3))
    assert (result["flagged"], result["watched"]) == (False, True)
    assert not any(result["categories"].values())


@pytest.mark.parametrize("action", [None, "flag", "off"])
def test_other_actions_are_neither(action: Any) -> None:
    """To record is not to hold anything against a text."""
    result = moderation.result(verdict(action, "S2", S2=0.3))
    assert (result["flagged"], result["watched"]) == (False, False)


def test_every_category_that_would_block_is_true() -> None:
    """Beside the one that decided, those that are over their thresholds too."""
    result = moderation.result(verdict("block", "S1", S1=0.9, S7=0.8), blocked=["S1", "S7"])
    assert [key for key, over in result["categories"].items() if over] == [
        "illicit/violent",
        "violence",
        "privacy",
    ]


def test_every_map_of_a_result_has_every_key() -> None:
    """Clients index by key: none is missing where nothing was found."""
    result = moderation.result(verdict(None, None))
    for name in ("categories", "category_scores", "category_applied_input_types"):
        assert tuple(result[name]) == moderation.ALL_KEYS


def test_keys_that_nothing_is_behind_apply_to_no_input() -> None:
    """A score that is 0 because nothing looks for it says so."""
    applied = moderation.result(verdict(None, None))["category_applied_input_types"]
    assert applied["violence"] == ["text"]
    assert [key for key, kinds in applied.items() if not kinds] == [
        "harassment/threatening",
        "hate/threatening",
        "violence/graphic",
    ]


def test_a_blocked_prompt_has_an_input_and_no_output() -> None:
    """The object beside the error: one result for the prompt, none for choices that never were."""
    made = moderation.of_blocked_prompt(verdict("block", "S1", S1=0.9))
    assert made["input"]["type"] == made["output"]["type"] == "moderation_results"
    assert [entry["flagged"] for entry in made["input"]["results"]] == [True]
    assert made["output"]["results"] == []


def test_results_of_an_answer_are_those_of_its_choices_in_order() -> None:
    """`output.results[i]` is `choices[i]`'s."""
    choices = [verdict(None, None, S1=0.1), verdict("block", "S1", S1=0.9)]
    made = moderation.of_answer(verdict("watch", "S1", S1=0.4), choices)
    assert [entry["flagged"] for entry in made["output"]["results"]] == [False, True]
    assert {entry["type"] for entry in made["output"]["results"]} == {"moderation_result"}
    assert {entry["model"] for entry in made["output"]["results"]} == {moderation.MODEL}


def test_what_could_not_be_judged_is_an_error_in_its_place() -> None:
    """A screen that failed open is told, not passed over."""
    made = moderation.moderation(
        moderation.failed("safety_unavailable", "It failed."), moderation.not_judged()
    )
    assert made["input"] == {"type": "error", "code": "safety_unavailable", "message": "It failed."}
    assert made["output"]["type"] == "error"


def test_a_refusal_has_the_object_beside_the_error() -> None:
    """OpenAI's error body, and what was found beside it."""
    made = moderation.of_blocked_prompt(verdict("block", "S1", S1=0.9))
    error = ContentFiltered("This cannot be answered.", made)
    body = error.as_body()
    assert (error.status, error.code) == (400, "content_filter")
    assert body["moderation"] == made
    assert body["error"] == {
        "message": "This cannot be answered.",
        "type": "invalid_request_error",
        "param": "messages",
        "code": "content_filter",
    }
