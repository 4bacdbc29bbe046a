"""The n-gram model: logistic regression on NB-weighted hashed n-grams (Wang and Manning, 2012).

The weights shipped have the naive-Bayes ratios multiplied in, so that serving only adds up.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression, SGDClassifier

from app.safety.categories import CATEGORIES
from app.safety.classifiers.features import distinct
from app.safety.classifiers.ngrams import BITS, CATEGORY_BITS, NGrams
from app.safety.text.normalize import normalize
from scripts.training.safety import balance
from scripts.training.safety.rows import Row

_CHARS = 2_000


def matrix(texts: Sequence[str]) -> csr_matrix:
    """One row per text, its n-grams each 1 over the root of how many there are."""
    places = [distinct(normalize(text[: 2 * _CHARS])[:_CHARS], BITS) for text in texts]
    counts = np.array([len(row_places) for row_places in places])
    values = np.repeat(1.0 / np.sqrt(counts), counts).astype(np.float32)
    return csr_matrix(
        (values, np.concatenate(places), np.concatenate([[0], counts.cumsum()])), (len(texts), 1 << BITS)
    )


class Features:
    """The n-grams of the prompts among rows, counted once for all trainings."""

    def __init__(self, rows: Sequence[Row]) -> None:
        prompts = [row for row in rows if row.kind == "prompt"]
        self._matrix = matrix([row.text for row in prompts])
        self._place = {id(row): place for place, row in enumerate(prompts)}

    @staticmethod
    def prompts(rows: Sequence[Row]) -> list[Row]:
        """Those of the rows that have features."""
        return [row for row in rows if row.kind == "prompt"]

    def of(self, rows: Sequence[Row]) -> csr_matrix:
        """(rows, places): the features of these prompts."""
        return self._matrix[[self._place[id(row)] for row in rows]]


def train(rows: Sequence[Row], features: Features) -> NGrams:
    """The model of these prompts."""
    return _fit(rows, features.of(rows))


def _fit(rows: Sequence[Row], features: csr_matrix) -> NGrams:
    harmful = np.array([bool(row.harmful) for row in rows])
    weights = balance.weights(rows)
    ratio = _ratios(features, harmful, weights)
    scaled = features.multiply(ratio[None, :]).tocsr().astype(np.float32)
    model = LogisticRegression(C=8.0, solver="liblinear", max_iter=60)
    model.fit(scaled, harmful, sample_weight=weights)
    harm = model.coef_[0] * ratio
    categories, bias = _categories(rows, features)
    return NGrams(
        harm.astype(np.float16),
        float(model.intercept_[0]),
        categories.astype(np.float16),
        bias.astype(np.float32),
        *_english(rows, features),
    )


def _ratios(
    features: csr_matrix, harmful: NDArray[np.bool_], weights: NDArray[np.float64]
) -> NDArray[np.float64]:
    present = features.astype(bool).astype(np.float64)
    yes = 1.0 + weights[harmful] @ present[harmful]
    no = 1.0 + weights[~harmful] @ present[~harmful]
    log = np.log((yes / yes.sum()) / (no / no.sum()))
    # Without the floor, n-grams as frequent on both sides could never get a weight.
    result: NDArray[np.float64] = np.sign(log) * np.maximum(np.abs(log), 0.2)
    return result


def _english(rows: Sequence[Row], features: csr_matrix) -> tuple[NDArray[np.float16], float]:
    """Weights and bias of whether a text is English, over the places of the categories."""
    chosen = np.array([i for i, row in enumerate(rows) if row.is_english is not None])
    model = LogisticRegression(C=8.0, solver="liblinear", max_iter=30, class_weight="balanced")
    model.fit(_folded(features[chosen]), [rows[i].is_english for i in chosen])
    return model.coef_[0].astype(np.float16), float(model.intercept_[0])


def _folded(features: csr_matrix) -> csr_matrix:
    """Features over the places of the categories."""
    cells = features.tocoo()
    places = cells.col >> (BITS - CATEGORY_BITS)
    return csr_matrix((cells.data, (cells.row, places)), (features.shape[0], 1 << CATEGORY_BITS))


def _categories(rows: Sequence[Row], features: csr_matrix) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    chosen = np.array([i for i, row in enumerate(rows) if row.category])
    labels = np.array([CATEGORIES.index(str(rows[i].category)) for i in chosen])
    model = SGDClassifier(
        loss="log_loss", alpha=1e-5, max_iter=12, tol=None, random_state=0, class_weight="balanced"
    )
    model.fit(_folded(features[chosen]), labels)
    weights = np.zeros((len(CATEGORIES), 1 << CATEGORY_BITS))
    bias = np.full(len(CATEGORIES), -8.0)
    weights[model.classes_] = model.coef_
    bias[model.classes_] = model.intercept_
    return weights, bias


def save(model: NGrams, path: Path) -> None:
    """Write the file that NGrams.load reads."""
    np.savez_compressed(
        path,
        harm=model.harm,
        bias=np.float32(model.bias),
        categories=model.categories,
        offsets=model.offsets,
        english=model.english,
        english_bias=np.float32(model.english_bias),
    )
