"""The prompt classifier: n-grams for a first look, n-grams and encoder together for the verdict.

Every view of a text is scored, and the view with the highest score counts. The score of a category is the
harm of the text, times the category's probability relative to the likeliest category. So the highest score of
a text is its harm. `full` and `fast` have a scale of their own each.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.safety.categories import CATEGORIES
from app.safety.classifiers.encoder import Encoder
from app.safety.classifiers.model_files import ModelDamaged, verify
from app.safety.classifiers.ngrams import NGrams
from app.safety.policies.thresholds import FILE_NAME as CALIBRATION
from app.safety.text.normalize import views
from app.safety.verdict import Quick, Scores

FILES = ("ngrams.npz", "encoder.onnx", "tokenizer.json", CALIBRATION)


class Blend(NamedTuple):
    """From logits to the harm: sigmoid(encoder * e + ngrams * n + bias), and fast_* for n-grams alone."""

    encoder: float
    ngrams: float
    bias: float
    fast_slope: float
    fast_bias: float

    @classmethod
    def parse(cls, document: Mapping[str, Any]) -> Blend:
        """The numbers of calibration.json's `blend`. Raises KeyError, TypeError or ValueError."""
        blend = cls(**{name: float(document[name]) for name in cls._fields})
        if not all(math.isfinite(number) for number in blend):
            raise ValueError("the blend is not of finite numbers")
        return blend


class Classifier:
    """Scores single texts by category. Keeps no text; may be called from any thread."""

    def __init__(self, ngrams: NGrams, encoder: Encoder, blend: Blend, sure_below: float = 0.0) -> None:
        """`sure_below` is a harm by `fast` below which the encoder finds next to nothing more."""
        self.sure_below = sure_below
        self._ngrams = ngrams
        self._encoder = encoder
        self._blend = blend

    @classmethod
    def load(cls, folder: Path) -> Classifier:
        """The classifier of a folder of model files. Raises ModelDamaged."""
        verify(folder, FILES)
        try:
            calibration = json.loads((folder / CALIBRATION).read_bytes())
            blend = Blend.parse(calibration["blend"])
            ngrams = NGrams.load(folder / "ngrams.npz")
            encoder = Encoder.load(folder / "encoder.onnx", folder / "tokenizer.json")
        except Exception as exc:  # each library has errors of its own
            raise ModelDamaged(f"{folder}: the safety classifier cannot be read: {exc!r}") from exc
        return cls(ngrams, encoder, blend, float(calibration.get("sure_below", 0.0)))

    def fast(self, text: str) -> Quick:
        """The n-grams' scores of a text, in less than 1 ms for 2,000 characters."""
        ngrams, blend = self._ngrams, self._blend
        logit, places = max(map(ngrams.look, views(text)), key=itemgetter(0))
        logit = logit * blend.fast_slope + blend.fast_bias
        return Quick(_harm(logit), lambda: _scores(logit, ngrams.topics(places)))

    def full(self, text: str) -> Scores:
        """The scores of n-grams and encoder together, in 2 to 20 ms for each 500 characters: for a thread."""
        shown = views(text)
        encoded = self._encoder.logits(shown)
        counted = np.array([self._ngrams.look(view)[0] for view in shown])
        blend = self._blend
        logits = encoded[:, 0] * blend.encoder + counted * blend.ngrams + blend.bias
        worst = int(np.argmax(logits))
        return _scores(float(logits[worst]), encoded[worst, 1:])


def _scores(logit: float, topics: NDArray[np.float32]) -> Scores:
    harm = _harm(logit)
    shares = np.exp(topics - topics.max())
    return {category: harm * float(share) for category, share in zip(CATEGORIES, shares, strict=True)}


def _harm(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-max(-30.0, min(30.0, logit))))
