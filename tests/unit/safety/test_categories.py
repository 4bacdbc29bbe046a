"""The categories: named once, in OpenAI's words where it has some."""

from __future__ import annotations

import pytest
from openai.types.moderation import CategoryScores

from app.safety.categories import ALL, CATEGORIES, LOCKED, OPENAI_KEYS, code_of, name_of


def test_codes_are_the_hazards_in_order_and_the_jailbreak():
    """S1 to S13, then JB: scores stand in this order everywhere."""
    assert (*(f"S{i}" for i in range(1, 14)), "JB") == CATEGORIES
    assert {category.name for category in ALL if category.code in LOCKED} == {"child_exploitation"}


def test_a_category_is_known_by_code_and_by_name():
    """Either gives the code, the code gives the name, and nothing else is one."""
    for category in ALL:
        assert code_of(category.code) == code_of(category.name) == category.code
        assert name_of(category.code) == category.name
    for other in ("S14", "", "s1"):
        with pytest.raises(KeyError):
            code_of(other)


def test_openai_keys_are_those_of_its_sdk():
    """Every key that its moderation answer has, and ours say no other."""
    theirs = {field.alias or name for name, field in CategoryScores.model_fields.items()}
    assert set(OPENAI_KEYS) == theirs
    assert {key for category in ALL for key in category.openai} <= theirs
