"""The n-gram model: each n-gram of a text counts once, and a text's length does not make it harmful."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from app.safety.classifiers.features import distinct
from app.safety.classifiers.ngrams import BITS, CATEGORY_BITS, NGrams
from scripts.training.safety import train_ngrams

NUM_CATEGORIES = 3


def model(*, harm: float = 0.0, bias: float = 0.0) -> NGrams:
    """A model in which every n-gram weighs the same, and the categories differ by their number."""
    rows = np.arange(NUM_CATEGORIES, dtype=np.float16)[:, None] * np.ones(1 << CATEGORY_BITS, np.float16)
    offsets = np.array([5.0, 0.0, 0.0], np.float32)
    english = np.full(1 << CATEGORY_BITS, 1.0, np.float16)
    return NGrams(np.full(1 << BITS, harm, np.float16), bias, rows, offsets, english, -1.5)


def logits(made: NGrams, text: str) -> tuple[float, list[float]]:
    """The harm logit of a text and those of the categories."""
    harm, places = made.look(text)
    return harm, made.topics(places).tolist()


def test_text_without_weight_has_the_bias():
    """An empty one too, whose topics are the offsets."""
    assert logits(model(bias=-2.5), "any text at all")[0] == -2.5
    harm, topics = logits(model(bias=-2.5), "")
    assert harm == -2.5
    assert topics[0] == 5.0


def test_weights_are_added_and_scaled_by_the_root_of_their_number():
    """A word that is said ten times is no ten times as harmful."""
    text = "some words of a text"
    places = distinct(text, BITS)
    harm, topics = logits(model(harm=1.0), text)
    root = len(places) ** 0.5
    assert harm == pytest.approx(root)
    assert topics == pytest.approx([5.0, root, 2 * root], rel=1e-3)
    assert logits(model(harm=1.0), f"{text} {text}")[0] < 2 * harm


def test_single_weight_is_found_in_the_texts_that_have_its_ngram():
    """And in no other."""
    made = model()
    (place, *_) = distinct("forbidden", BITS)
    harm = made.harm.copy()
    harm[place] = 8.0
    single = NGrams(harm, 0.0, made.categories, made.offsets, made.english, 0.0)
    assert single.look("a forbidden thing")[0] > 0
    assert single.look("xyzzy")[0] == 0


def test_model_is_what_its_file_says(tmp_path: Path):
    """Loaded, it says the same."""
    made = model(harm=0.5, bias=1.0)
    path = tmp_path / "ngrams.npz"
    train_ngrams.save(made, path)
    loaded = NGrams.load(path)
    assert logits(loaded, "some words")[0] == logits(made, "some words")[0]
    for text in ("", "some words"):
        assert loaded.is_english(loaded.look(text)[1]) == made.is_english(made.look(text)[1]) == bool(text)


def test_file_of_another_size_is_no_model(tmp_path: Path):
    """Its places would be others."""
    made = model()
    path = tmp_path / "ngrams.npz"
    train_ngrams.save(NGrams(made.harm[:8], 0.0, made.categories, made.offsets, made.english, 0.0), path)
    with pytest.raises(ValueError, match="tables of another size"):
        NGrams.load(path)
