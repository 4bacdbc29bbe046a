"""Hashed n-grams: what counts as one, and that a place says nothing about where in the text it was."""

from __future__ import annotations

import re
from itertools import pairwise

import numpy as np
import pytest

from app.safety.classifiers import features
from app.safety.classifiers.features import CHUNK_CHARS, distinct, hashed, word_edges, wordlike


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
    """Beyond CHUNK_CHARS characters all words are still seen."""
    text = "one two three " * (CHUNK_CHARS // 5)
    assert set(distinct("three", 18).tolist()) & set(distinct(text, 18).tolist())


def test_lone_surrogates_are_read():
    """What JSON lets through does not raise."""
    assert len(hashed("\ud800 and more")) > 0


def by_the_formula(text: str) -> list[int]:
    """What the module's description says, in Python's own whole numbers."""
    text, modulus = f" {text} ", 1 << 64

    def polynomial(span: str) -> int:
        value = 0
        for char in span:
            value = (value * features._BASE + ord(char) + 1) % modulus
        return value

    def mixed(value: int) -> int:
        value = value * int(features._MIX) % modulus
        return (value ^ value >> 32) * int(features._MIX) % modulus

    spans = re.findall("[0-9A-Za-z\u00c0-\u1fff\u2070-\u2fff\u3001-\U0010ffff]+", text)
    words = [polynomial(word) * pow(features._BASE, 1 - len(word), modulus) % modulus for word in spans]
    pairs = [(first * int(features._PAIR) + second) % modulus for first, second in pairwise(words)]
    chars = [polynomial(text[at : at + n]) for n in (3, 4, 5) for at in range(len(text) - n + 1)]
    salts = (features._SALT_WORD, features._SALT_PAIR, features._SALT_CHARS)
    kinds = zip((words, pairs, chars), map(int, salts), strict=True)
    return [mixed(value ^ salt) for values, salt in kinds for value in values]


@pytest.mark.parametrize("text", ["how are you, r2d2?", "a", "", "ça va, 日本 \U0001f600 ok"])
def test_every_hash_is_what_the_formula_says(text: str):
    """Words, pairs and characters, of ASCII and of other scripts, each where it is expected."""
    assert hashed(text).tolist() == by_the_formula(text)


def test_the_hash_is_the_one_that_the_weights_were_trained_with():
    """Another hash needs another model: this value may only change with ngrams.npz."""
    assert distinct("how are you", 18)[:4].tolist() == [1102, 11156, 22449, 29275]
