"""The n-gram model: weights of hashed n-grams added up, a millisecond for 2,000 characters."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.safety.classifiers.features import distinct

BITS = 18
"""The harm weights are 2**BITS."""
CATEGORY_BITS = 15
"""The weights of one category are 2**CATEGORY_BITS."""


class NGrams:
    """The weights: a logit for harm, and one for each category. Immutable; may be called from any thread.

    `harm` has a weight for each place of the table, `categories` a row for each category over the
    upper bits of the same places; `bias` and `offsets` are added.
    """

    def __init__(
        self,
        harm: NDArray[np.float16],
        bias: float,
        categories: NDArray[np.float16],
        offsets: NDArray[np.float32],
    ) -> None:
        self.harm = harm
        self.bias = bias
        self.categories = categories
        self.offsets = offsets
        # As they are read: half floats add up slowly, and one place's rows lie apart.
        self._harm = harm.astype(np.float32)
        self._topics = np.ascontiguousarray(categories.T, np.float32)

    @classmethod
    def load(cls, path: Path) -> NGrams:
        """The model of a file. Raises OSError, KeyError or ValueError if it is none."""
        with np.load(path, allow_pickle=False) as arrays:
            model = cls(arrays["harm"], float(arrays["bias"]), arrays["categories"], arrays["offsets"])
        if model.harm.shape != (1 << BITS,) or model.categories.shape[1:] != (1 << CATEGORY_BITS,):
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

    def topics(self, places: NDArray[np.intp]) -> NDArray[np.float32]:
        """The logits of the categories, of a text whose n-grams have these places."""
        above = self._topics.take(places >> (BITS - CATEGORY_BITS), axis=0)
        topics: NDArray[np.float32] = np.full(len(places), _scale(places), np.float32) @ above
        return topics + self.offsets


def _scale(places: NDArray[np.intp]) -> float:
    return 1.0 / math.sqrt(max(len(places), 1))
