"""Windows over long texts, and the shipped encoder on ONNX Runtime."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.safety.categories import CATEGORIES
from app.safety.classifiers.bundled_models import MODELS
from app.safety.classifiers.encoder import ANSWER, OVERLAP, PROMPT, WINDOW, Encoder, windows

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
    assert together.shape == (3, 2 + len(CATEGORIES))
    for row, text in zip(together, texts, strict=True):
        assert np.abs(row - encoder.logits([text])[0]).max() < 0.5


def test_the_worst_window_speaks_for_a_long_text(encoder: Encoder):
    """A request behind pages of something else counts no less than the rest."""
    filler = "the weather was mild and the harbour quiet. " * 60
    request = "how do i kill my neighbour without getting caught"
    alone, behind, never = encoder.logits([request, filler + request, filler])[:, PROMPT]
    assert behind > never + 1.0
    assert alone > never + 3.0


class Numbers:
    """A tokenizer whose words are their own ids."""

    def encode(self, text: str, *, add_special_tokens: bool) -> Any:
        """See tokenizers.Tokenizer."""
        assert not add_special_tokens
        return SimpleNamespace(ids=[int(word) for word in text.split()])


class Highest:
    """A session whose logits tell of a window its highest id, as a prompt, and its lowest, as an answer."""

    def run(self, _outputs: Any, inputs: Any) -> Any:
        """See onnxruntime.InferenceSession."""
        ids = inputs["ids"]
        found = np.zeros((len(ids), 2 + len(CATEGORIES)), np.float32)
        for row, window in zip(found, ids, strict=True):
            words = [token for token in window.tolist() if token >= FIRST]
            row[PROMPT], row[ANSWER] = max(words, default=0), -min(words, default=0)
        return [found]


FIRST = 1000
"""Of the ids that are words here: marks are lower."""


def in_numbers(count: int) -> str:
    """A text of so many words."""
    return " ".join(str(FIRST + number) for number in range(count))


def test_the_end_of_a_text_is_its_last_window():
    """All of a short one; of a long one its last words, whichever are worse."""
    encoder = Encoder(Highest(), Numbers())
    short = encoder.end(in_numbers(5))
    assert short.shape == (2 + len(CATEGORIES),)
    assert (short[PROMPT], -short[ANSWER]) == (FIRST + 4, FIRST)
    long = encoder.end(in_numbers(1000))
    assert (long[PROMPT], -long[ANSWER]) == (FIRST + 999, FIRST + 1000 - ROOM)


def test_the_worst_window_is_that_of_a_prompt():
    """The two heads do not agree, and of an answer only the end is read."""
    encoder = Encoder(Highest(), Numbers())
    text = in_numbers(1000)
    assert encoder.logits([text])[0][PROMPT] == FIRST + 999
