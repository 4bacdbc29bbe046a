"""The n-gram model: weights of hashed n-grams added up, a millisecond for 2,000 characters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.safety.classifiers.features import distinct, span_places, word_edges

BITS = 18
"""The harm weights are 2**BITS."""
CATEGORY_BITS = 15
"""The weights of one category are 2**CATEGORY_BITS."""


class Evidence(NamedTuple):
    """A word or a pair of words, and what it adds to the logit of harm."""

    words: str
    logit: float


class NGrams:
    """The weights: a logit for harm, and one for each category. Immutable; may be called from any thread.

    `harm` has a weight for each place of the table, `categories` a row for each category over the
    upper bits of the same places; `bias` and `offsets` are added. `english` says over these whether a text is
    in English.
    """

    def __init__(
        self,
        harm: NDArray[np.float16],
        bias: float,
        categories: NDArray[np.float16],
        offsets: NDArray[np.float32],
        english: NDArray[np.float16],
        english_bias: float,
    ) -> None:
        self.harm = harm.astype(np.float32)  # half floats add up slowly
        self.bias = bias
        self.categories = categories
        self.offsets = offsets
        self.english = english.astype(np.float32)
        self.english_bias = english_bias
        self._topics = np.ascontiguousarray(categories.T, np.float32)  # the rows of one place lie apart

    @classmethod
    def load(cls, path: Path) -> NGrams:
        """The model of a file. Raises OSError, KeyError or ValueError if it is none."""
        with np.load(path, allow_pickle=False) as arrays:
            model = cls(
                arrays["harm"],
                float(arrays["bias"]),
                arrays["categories"],
                arrays["offsets"],
                arrays["english"],
                float(arrays["english_bias"]),
            )
        sizes = (model.harm.shape, model.categories.shape[1:], model.english.shape)
        if sizes != ((1 << BITS,), (1 << CATEGORY_BITS,), (1 << CATEGORY_BITS,)):
            raise ValueError(f"{path.name} has tables of another size")
        return model

    def look(self, text: str) -> tuple[float, NDArray[np.intp]]:
        """The harm logit of a normalized text, and the places of the table that its n-grams have."""
        places = distinct(text, BITS)
        return float(np.add.reduce(self.harm.take(places))) * _scale(places) + self.bias, places

    def is_english(self, places: NDArray[np.intp]) -> bool:
        """True if a text whose n-grams have these places is in English."""
        weights = self.english.take(places >> (BITS - CATEGORY_BITS))
        return float(np.add.reduce(weights)) * _scale(places) + self.english_bias >= 0.0

    def evidence(self, text: str) -> list[Evidence]:
        """The words and pairs of words of a normalized text by their part in the harm logit, the most first.

        A word has the n-grams of its characters and of its edges with it; others across words count for none.
        An n-gram counts where it is first.
        """
        strengths: dict[str, float] = {}
        counted: set[int] = set()
        padded = f" {text} "
        edges = word_edges(padded).tolist()
        begins, stops = edges[::2], edges[1::2]
        for start, end in zip(begins, stops, strict=True):
            self._add(padded[start:end], span_places(padded[start - 1 : end + 1], BITS), strengths, counted)
        for start, end in zip(begins, stops[1:], strict=False):
            self._add(padded[start:end], span_places(padded[start:end], BITS)[2:3], strengths, counted)
        scale = _scale(distinct(text, BITS))
        named = [Evidence(words, strength * scale) for words, strength in strengths.items()]
        return sorted(named, key=lambda evidence: -evidence.logit)

    def _add(
        self, words: str, places: NDArray[np.intp], strengths: dict[str, float], counted: set[int]
    ) -> None:
        fresh = [place for place in dict.fromkeys(places.tolist()) if place not in counted]
        counted.update(fresh)
        strengths[words] = strengths.get(words, 0.0) + float(self.harm[fresh].sum())

    def topics(self, places: NDArray[np.intp]) -> NDArray[np.float32]:
        """The logits of the categories, of a text whose n-grams have these places."""
        above = self._topics.take(places >> (BITS - CATEGORY_BITS), axis=0)
        topics: NDArray[np.float32] = np.full(len(places), _scale(places), np.float32) @ above
        return topics + self.offsets


def _scale(places: NDArray[np.intp]) -> float:
    return 1.0 / math.sqrt(max(len(places), 1))
