"""Percentiles, and bootstrap intervals of a ratio over interleaved pairs of runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

BOOTSTRAP_RESAMPLES = 10_000


@dataclass(frozen=True, slots=True)
class Ratio:
    """The geometric mean of the pairs' ratios, with its bootstrap 95% interval."""

    value: float
    low: float
    high: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of `values`, linear between closest ranks; NaN of nothing."""
    return float(np.percentile(values, percent)) if values else float("nan")


def paired_ratio(ours: Sequence[float], peer: Sequence[float], *, seed: int = 1) -> Ratio:
    """Ours/peer as the geometric mean over pairs; the interval resamples pairs, so a slow minute hits both.

    NaN where a value is missing or not positive.
    """
    if len(ours) != len(peer):
        raise ValueError(f"{len(ours)} runs of ours and {len(peer)} of the peer are not pairs")
    pairs = np.array([ours, peer], dtype=float)
    if not pairs.size or not np.all(pairs > 0):
        return Ratio(float("nan"), float("nan"), float("nan"))
    log_ratios = np.log(pairs[0]) - np.log(pairs[1])
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, log_ratios.size, size=(BOOTSTRAP_RESAMPLES, log_ratios.size))
    low, high = np.percentile(log_ratios[picks].mean(axis=1), [2.5, 97.5])
    return Ratio(float(np.exp(log_ratios.mean())), float(np.exp(low)), float(np.exp(high)))
