"""Percentiles, shares, and bootstrap intervals of a ratio: over interleaved pairs of runs, or two samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

BOOTSTRAP_RESAMPLES = 10_000
RESAMPLES_AT_ONCE = 100


@dataclass(frozen=True, slots=True)
class Ratio:
    """The geometric mean of the pairs' ratios, with its bootstrap 95% interval."""

    value: float
    low: float
    high: float


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of `values`, linear between closest ranks; NaN of nothing."""
    return float(np.percentile(values, percent)) if values else float("nan")


def paired_ratio(
    ours: Sequence[float], peer: Sequence[float], starts: Sequence[int] | None = None, *, seed: int = 1
) -> Ratio:
    """Ours/peer as the geometric mean over pairs; the interval resamples pairs, so a slow minute hits both.

    `starts` says of which start of the servers each pair is: their means are what is compared and
    resampled then. NaN where a value is missing or not positive; of a single pair, or start, there is no
    interval.
    """
    if len(ours) != len(peer) or (starts is not None and len(starts) != len(ours)):
        raise ValueError(f"{len(ours)} runs of ours and {len(peer)} of the peer are not pairs")
    pairs = np.array([ours, peer], dtype=float)
    if not pairs.size or not np.all(pairs > 0):
        return Ratio(float("nan"), float("nan"), float("nan"))
    log_ratios = np.log(pairs[0]) - np.log(pairs[1])
    if starts is not None:
        log_ratios = np.array([log_ratios[np.equal(starts, each)].mean() for each in np.unique(starts)])
    value = float(np.exp(log_ratios.mean()))
    if log_ratios.size < 2:
        return Ratio(value, float("nan"), float("nan"))
    rng = np.random.default_rng(seed)
    picks = rng.integers(0, log_ratios.size, size=(BOOTSTRAP_RESAMPLES, log_ratios.size))
    low, high = np.percentile(log_ratios[picks].mean(axis=1), [2.5, 97.5])
    return Ratio(value, float(np.exp(low)), float(np.exp(high)))


def bootstrap_ratio(
    ours: Sequence[float],
    base: Sequence[float],
    statistic: Callable[..., Any] = np.mean,
    *,
    seed: int = 1,
) -> Ratio:
    """A statistic of `ours` over the same of `base`; the interval resamples each by itself.

    `statistic` takes an array and `axis`. NaN where a sample is empty or the base's is not positive.
    """
    a, b = np.array(ours, dtype=float), np.array(base, dtype=float)
    if not a.size or not b.size or not statistic(b, axis=0) > 0:
        return Ratio(float("nan"), float("nan"), float("nan"))
    rng, ratios = np.random.default_rng(seed), []
    for _ in range(BOOTSTRAP_RESAMPLES // RESAMPLES_AT_ONCE):
        above = statistic(a[rng.integers(0, a.size, size=(RESAMPLES_AT_ONCE, a.size))], axis=1)
        below = statistic(b[rng.integers(0, b.size, size=(RESAMPLES_AT_ONCE, b.size))], axis=1)
        ratios.append(above[below > 0] / below[below > 0])
    low, high = np.percentile(np.concatenate(ratios), [2.5, 97.5])
    return Ratio(float(statistic(a, axis=0) / statistic(b, axis=0)), float(low), float(high))


def share(count: int, whole: int) -> Ratio:
    """A share with its Wilson score 95% interval (1927); NaN of nothing."""
    from scipy.stats import binomtest  # half a second: only the benchmarks that count shares wait for it

    if not whole:
        return Ratio(float("nan"), float("nan"), float("nan"))
    interval = binomtest(count, whole).proportion_ci(method="wilson")
    return Ratio(count / whole, float(interval.low), float(interval.high))
