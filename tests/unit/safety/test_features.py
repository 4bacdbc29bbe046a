"""Hashed n-grams: what counts as one, and that a place says nothing about where in the text it was."""

from __future__ import annotations

import numpy as np
import pytest

from app.safety.features import PIECE, distinct, hashed, word_edges, wordlike


def word_hashes(text: str) -> list[int]:
    """The hashes of a text's words, which come first."""
    return hashed(text)[: len(word_edges(text)) // 2].tolist()


def test_a_word_is_the_same_wherever_it_stands():
    """Its hash does not depend on its position."""
    first, second = word_hashes("kill the process"), word_hashes("please do not kill it")
    assert first[0] == second[3]


def test_different_words_have_different_hashes():
    """Anagrams and prefixes are other words."""
    assert len(set(word_hashes("stop pots spot top tops a aa aaa"))) == 8


def test_signs_and_spaces_part_words():
    """Letters and digits of any script belong to words, signs do not."""
    assert len(word_hashes("a-b  c3_ü…日本!")) == 5


def test_the_mask_of_words_is_by_code_point():
    """ASCII letters and digits, and what lies beyond ASCII but its punctuation."""
    assert list(wordlike("a 1.é\u2026\u3000漢")) == [1, 0, 1, 0, 1, 0, 0, 1]


def test_all_kinds_of_n_grams_are_counted():
    """`ab cd` between two spaces: two words, a pair, and characters by 3, 4 and 5."""
    assert len(hashed("ab cd")) == 2 + 1 + (5 + 4 + 3)


@pytest.mark.parametrize("text", ["", " ", ".", "a", "é"])
def test_the_shortest_texts_have_features_or_none(text: str):
    """Nothing raises, and the places are in the table."""
    places = distinct(text, 18)
    assert all(0 <= place < 1 << 18 for place in places.tolist())


def test_a_repeated_n_gram_has_one_place():
    """`distinct` is sorted and without repetitions."""
    places = distinct("tick tock " * 50, 18)
    assert np.array_equal(places, np.unique(places))
    assert len(places) < 100


def test_a_long_text_goes_in_pieces():
    """Beyond PIECE characters all words are still seen."""
    text = "one two three " * (PIECE // 5)
    assert set(distinct("three", 18).tolist()) & set(distinct(text, 18).tolist())


def test_lone_surrogates_are_read():
    """What JSON lets through does not raise."""
    assert len(hashed("\ud800 and more")) > 0


def test_the_hash_is_the_one_that_the_weights_were_trained_with():
    """Another hash needs another model: this value may only change with ngrams.npz."""
    assert distinct("how are you", 18)[:4].tolist() == [1102, 11156, 22449, 29275]
