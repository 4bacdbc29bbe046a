"""The figures that the product computes itself are those of scikit-learn and SciPy, as far as shown."""

from __future__ import annotations

import random

import numpy as np
import pytest
from scipy.stats import binomtest
from sklearn import metrics

from app.safety.evaluation.prompts import Judged, Row, counts, figures, rate, recall_at, roc

TARGETS = (0.001, 0.01, 0.05, 0.1)


def drawn(seed: int, digits: int) -> list[Judged]:
    """Rows whose scores overlap; the fewer digits, the more of them are equal."""
    rng = random.Random(seed)
    rows = []
    for number in range(rng.randrange(50, 800)):
        harmful = number % 3 == 0
        score = round(min(max(rng.gauss(0.6 if harmful else 0.4, 0.2), 0), 1), digits)
        rows.append(Judged(Row("x", harmful, "S1", "a"), score, None, 1.0, 1.0))
    return rows


def arrays(rows: list[Judged]) -> tuple[np.ndarray, np.ndarray]:
    """Labels and scores, as scikit-learn takes them."""
    return np.array([each.row.harmful for each in rows]), np.array([each.score for each in rows])


@pytest.mark.parametrize("digits", [1, 2, 16])
@pytest.mark.parametrize("seed", range(8))
def test_auc_and_average_precision_are_those_of_scikit_learn(seed: int, digits: int):
    """With and without equal scores."""
    rows = drawn(seed, digits)
    labels, scores = arrays(rows)
    shown = figures(rows)
    assert shown["auc"] == round(float(metrics.roc_auc_score(labels, scores)), 4)
    assert shown["ap"] == round(float(metrics.average_precision_score(labels, scores)), 4)


@pytest.mark.parametrize("digits", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_the_curve_has_the_points_of_scikit_learn(seed: int, digits: int):
    """Every threshold, in the same order."""
    rows = drawn(seed, digits)
    fpr, recall, _ = metrics.roc_curve(*arrays(rows), drop_intermediate=False)
    assert np.array(roc(rows)) == pytest.approx(np.column_stack([fpr, recall]), abs=1e-15)


@pytest.mark.parametrize("digits", [1, 16])
@pytest.mark.parametrize("seed", range(4))
def test_recall_at_a_rate_is_a_point_of_the_curve(seed: int, digits: int):
    """The highest recall among the points whose false positive rate is allowed."""
    rows = drawn(seed, digits)
    fpr, recall, _ = metrics.roc_curve(*arrays(rows), drop_intermediate=False)
    for target in TARGETS:
        assert recall_at(counts(rows), target) == pytest.approx(recall[fpr <= target + 1e-12].max())


@pytest.mark.parametrize("whole", [1, 2, 7, 60, 1_000, 40_000])
def test_the_interval_of_a_rate_is_that_of_scipy(whole: int):
    """Wilson's, at none, some and all."""
    for hits in {0, 1, whole // 3, whole - 1, whole}:
        interval = binomtest(hits, whole).proportion_ci(method="wilson")
        assert rate(hits, whole) == {
            "rate": round(hits / whole, 4),
            "low": round(float(interval.low), 4),
            "high": round(float(interval.high), 4),
        }
