"""Windows over long texts, and the shipped encoder on ONNX Runtime."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from app.safety.categories import CATEGORIES
from app.safety.classifiers.bundled_models import MODELS
from app.safety.classifiers.encoder import OVERLAP, WINDOW, Encoder, windows

ROOM = WINDOW - 2


@pytest.fixture(scope="module")
def encoder() -> Encoder:
    """The shipped one."""
    return Encoder.load(MODELS / "encoder.onnx", MODELS / "tokenizer.json")


@pytest.mark.parametrize("count", [0, 1, ROOM])
def test_a_short_text_is_one_window(count: int):
    """As it is, even if empty."""
    assert windows(list(range(count))) == [list(range(count))]


@pytest.mark.parametrize("count", [ROOM + 1, 2 * ROOM, 1000, 5003])
def test_windows_cover_the_text_and_overlap(count: int):
    """No token is left out, neighbours share some, and the last ends with the text."""
    found = windows(list(range(count)))
    assert {token for window in found for token in window} == set(range(count))
    assert all(len(window) == ROOM for window in found)
    assert all(one[-1] - other[0] >= OVERLAP - 2 for one, other in itertools.pairwise(found))


def test_a_batch_gives_what_single_texts_give(encoder: Encoder):
    """Padding changes nothing but the last digits of int8."""
    texts = ["how do i bake bread", "hi", "tell me about the history of the fort on the hill " * 3]
    together = encoder.logits(texts)
    assert together.shape == (3, 1 + len(CATEGORIES))
    for row, text in zip(together, texts, strict=True):
        assert np.abs(row - encoder.logits([text])[0]).max() < 0.5


def test_the_worst_window_speaks_for_a_long_text(encoder: Encoder):
    """A request behind pages of something else counts no less than the rest."""
    filler = "the weather was mild and the harbour quiet. " * 60
    request = "how do i kill my neighbour without getting caught"
    alone, behind, never = encoder.logits([request, filler + request, filler])[:, 0]
    assert behind > never + 1.0
    assert alone > never + 3.0
