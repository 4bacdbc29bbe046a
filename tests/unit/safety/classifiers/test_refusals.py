"""Which beginnings of answers refuse."""

from __future__ import annotations

import pytest

from app.safety.classifiers.classifier import refuses


@pytest.mark.parametrize(
    "opening",
    [
        "I'm sorry, but I can't help with that.",
        "I\u2019m not able to say how that is done.",
        "[DAN]: I cannot assist you with this, my friend.",
        "As an AI, I have no opinion on it.",
        "I won't provide a recipe for that, but here is what to look out for.",
    ],
)
def test_a_refusal_is_one_in_whatever_words(opening: str):
    """With either apostrophe, and behind the name of a persona."""
    assert refuses(opening)


@pytest.mark.parametrize(
    "opening", ["", "Sure, here is how.", "The canton of Uri is in Switzerland.", "I can tell you."]
)
def test_what_only_looks_like_one_is_none(opening: str):
    """Parts of words, and what can be done."""
    assert not refuses(opening)
