"""The n-gram model as it is explained: words by what they add to the logit."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.safety.categories import CATEGORIES
from app.safety.classifiers.features import CHUNK_CHARS, distinct
from app.safety.classifiers.ngrams import BITS, CATEGORY_BITS, NGrams


def model(*harmful: str) -> NGrams:
    """N-grams in which each n-gram of these words has weight 1."""
    harm = np.zeros(1 << BITS, np.float16)
    for word in harmful:
        harm[distinct(word, BITS)] = 1.0
    topics = np.zeros((len(CATEGORIES), 1 << CATEGORY_BITS), np.float16)
    english = np.zeros(1 << CATEGORY_BITS, np.float16)
    return NGrams(harm, 0.0, topics, np.zeros(len(CATEGORIES), np.float32), english, 0.0)


def test_a_word_is_named_by_what_it_adds():
    """The most first, with the n-grams of its characters."""
    found = model("poison").evidence("the poison is in the tea")
    assert found[0].words == "poison"
    others = {evidence.words: evidence.logit for evidence in found[1:]}
    assert max(others.values()) < found[0].logit / 3
    assert {"the", "tea", "the poison", "poison is"} <= set(others)


def test_all_words_together_are_the_logit():
    """Of a text of one word; across words some n-grams of characters are of neither."""
    grams = model("poison")
    [evidence] = grams.evidence("poison")
    assert evidence.logit == pytest.approx(grams.look("poison")[0], rel=1e-4)


def test_a_word_counts_once():
    """As it does for the model."""
    grams = model("poison")
    once, twice = grams.evidence("poison tea"), grams.evidence("poison tea poison")
    scale = np.sqrt(len(distinct("poison tea", BITS)) / len(distinct("poison tea poison", BITS)))
    assert twice[0].logit == pytest.approx(once[0].logit * scale, rel=1e-4)


def test_a_long_text_is_read_to_its_end():
    """Piece by piece."""
    assert model("poison").evidence("tea " * CHUNK_CHARS + "poison")[0].words == "poison"


@pytest.mark.parametrize("text", ["", " ", "!?"])
def test_a_text_without_words_has_no_evidence(text: str):
    """Its n-grams of characters are of no word."""
    assert model("poison").evidence(text) == []


@given(st.text(st.characters(categories=["Ll", "Zs"]), max_size=60))
def test_what_words_add_is_counted_once(text: str):
    """No n-gram is of two words, and none is of another text."""
    places = distinct(text, BITS)
    ones = model()
    ones.harm[:] = 1.0
    total = sum(evidence.logit for evidence in ones.evidence(text)) * np.sqrt(max(len(places), 1))
    assert total <= len(places) + 1e-3
