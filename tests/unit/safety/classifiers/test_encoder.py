"""The end of a text, as the encoder of answers reads it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from app.safety.categories import CATEGORIES
from app.safety.classifiers.encoder import ANSWER, PROMPT, WINDOW, Encoder

ROOM = WINDOW - 2


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
