"""The n-gram model: weights of hashed n-grams added up, a millisecond for 2,000 characters."""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.safety.classifiers.features import PIECE, distinct, located, word_edges

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
        self.harm = harm
        self.bias = bias
        self.categories = categories
        self.offsets = offsets
        self.english = english
        self.english_bias = english_bias
        # As they are read: half floats add up slowly, and one place's rows lie apart.
        self._harm = harm.astype(np.float32)
        self._topics = np.ascontiguousarray(categories.T, np.float32)
        self._english = english.astype(np.float32)

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

    def logits(self, text: str) -> tuple[float, NDArray[np.float32]]:
        """The harm logit and those of the categories, of a normalized text."""
        harm, places = self.look(text)
        return harm, self.topics(places)

    def look(self, text: str) -> tuple[float, NDArray[np.intp]]:
        """The harm logit of a normalized text, and the places of the table that its n-grams have."""
        places = distinct(text, BITS)
        return float(np.add.reduce(self._harm.take(places))) * _scale(places) + self.bias, places

    def is_english(self, places: NDArray[np.intp]) -> bool:
        """Whether a text whose n-grams have these places is in English."""
        weights = self._english.take(places >> (BITS - CATEGORY_BITS))
        return float(np.add.reduce(weights)) * _scale(places) + self.english_bias >= 0.0

    def evidence(self, text: str) -> list[Evidence]:
        """What each word and pair of words of a normalized text adds to the harm logit, the most first.

        A word has the n-grams of its characters with it; those across words count for none. An n-gram
        counts where it is first.
        """
        strengths: dict[str, float] = {}
        seen: set[int] = set()
        scale = _scale(distinct(text, BITS))
        for at in range(0, len(text), PIECE - 2):
            self._add_evidence(text[at : at + PIECE - 2], strengths, seen)
        named = [Evidence(words, strength * scale) for words, strength in strengths.items()]
        return sorted(named, key=lambda evidence: -evidence.logit)

    def _add_evidence(self, text: str, strengths: dict[str, float], seen: set[int]) -> None:
        hashes, starts, ends = located(text)
        places = (hashes >> np.uint64(64 - BITS)).astype(np.intp)
        edges = word_edges(f" {text} ")
        begins, stops = edges[::2], edges[1::2]
        if not len(begins):
            return
        word = np.searchsorted(begins, starts + 1, "right") - 1
        for place, start, end, number in zip(places, starts, ends, word, strict=True):
            weight = float(self._harm[place])
            if int(place) in seen or number < 0:
                continue
            is_pair = number + 1 < len(begins) and start == begins[number] and end == stops[number + 1]
            last = number + is_pair
            if start < begins[number] - 1 or end > stops[last] + 1:
                continue
            seen.add(int(place))
            words = text[begins[number] - 1 : stops[last] - 1]
            strengths[words] = strengths.get(words, 0.0) + weight

    def topics(self, places: NDArray[np.intp]) -> NDArray[np.float32]:
        """The logits of the categories, of a text whose n-grams have these places."""
        above = self._topics.take(places >> (BITS - CATEGORY_BITS), axis=0)
        topics: NDArray[np.float32] = np.full(len(places), _scale(places), np.float32) @ above
        return topics + self.offsets


def _scale(places: NDArray[np.intp]) -> float:
    return 1.0 / math.sqrt(max(len(places), 1))
