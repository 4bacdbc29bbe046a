"""The n-gram model: weights of hashed n-grams added up, a millisecond for 2,000 characters."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.safety.features import distinct

BITS = 18
"""The harm weights are 2**BITS."""
CATEGORY_BITS = 15
"""The weights of one category are 2**CATEGORY_BITS."""


class NGrams:
    """A logit for harm, and one for each category. Immutable; any thread may call it.

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

    def harm_logit(self, text: str) -> float:
        """The harm logit of a normalized text."""
        return self._harm_logit(distinct(text, BITS))

    def logits(self, text: str) -> tuple[float, NDArray[np.float32]]:
        """The harm logit and those of the categories, of a normalized text."""
        places = distinct(text, BITS)
        above = self._topics.take(places >> (BITS - CATEGORY_BITS), axis=0)
        topics = np.full(len(places), _scale(places), np.float32) @ above
        return self._harm_logit(places), topics + self.offsets

    def _harm_logit(self, places: NDArray[np.intp]) -> float:
        return float(np.add.reduce(self._harm.take(places))) * _scale(places) + self.bias


def _scale(places: NDArray[np.intp]) -> float:
    return 1.0 / math.sqrt(max(len(places), 1))
