"""Statistics of the benchmarks: percentiles and paired bootstrap ratios."""

import math

import numpy as np
import pytest

from scripts.benchmarks.stats import bootstrap_ratio, paired_ratio, percentile, share


def test_percentile_is_linear_between_ranks():
    """The 50th of 1..4 lies between 2 and 3, the 100th is the largest."""
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([4.0, 1.0, 3.0, 2.0], 100) == 4.0


def test_percentile_of_nothing_is_nan():
    """No samples give NaN, not an exception in the middle of a table."""
    assert math.isnan(percentile([], 99))


def test_ratio_of_equal_runs_is_exactly_one():
    """A/A with the same numbers has a ratio and an interval of exactly 1."""
    ratio = paired_ratio([3.0, 5.0, 7.0], [3.0, 5.0, 7.0])
    assert (ratio.value, ratio.low, ratio.high) == (1.0, 1.0, 1.0)


def test_ratio_is_the_geometric_mean_of_the_pairs():
    """Pairs of 1/2 and 2/1 cancel out."""
    assert paired_ratio([1.0, 2.0], [2.0, 1.0]).value == pytest.approx(1.0)


def test_a_slow_minute_that_hits_both_sides_of_a_pair_leaves_the_interval_narrow():
    """Only the ratio within a pair counts: runs that differ tenfold between pairs give the same ratio."""
    speeds = [1.0, 10.0, 2.0, 7.0, 0.5]
    ratio = paired_ratio([0.6 * speed for speed in speeds], speeds)
    assert ratio.low == pytest.approx(0.6)
    assert ratio.high == pytest.approx(0.6)


def test_interval_covers_the_truth_as_often_as_it_says():
    """Over 300 experiments of 20 pairs, the 95% interval holds the true ratio in 88% to 99% of them."""
    rng = np.random.default_rng(7)
    covered = 0
    for _ in range(300):
        peer = rng.lognormal(0.0, 0.2, size=20)
        ours = 0.8 * rng.lognormal(0.0, 0.2, size=20)
        ratio = paired_ratio(ours.tolist(), peer.tolist())
        covered += ratio.low <= 0.8 <= ratio.high
    assert 0.88 <= covered / 300 <= 0.99


def test_pairs_of_one_start_count_as_one():
    """A start that is 10% slower in each of its pairs widens the interval by as much as one pair would."""
    ours, starts = [1.0, 1.1, 1.1, 1.1, 1.0, 1.0], [0, 1, 1, 1, 2, 2]
    ratio = paired_ratio(ours, [1.0] * 6, starts)
    assert ratio == paired_ratio([1.0, 1.1, 1.0], [1.0] * 3)
    assert ratio.value == pytest.approx(1.1 ** (1 / 3))


def test_a_start_for_each_pair_is_asked_for():
    """Starts of other pairs than there are would be resampled wrongly."""
    with pytest.raises(ValueError, match="not pairs"):
        paired_ratio([1.0, 1.0], [1.0, 2.0], [0])


def test_one_start_has_no_interval():
    """However many pairs it has: a verdict on it is open."""
    ratio = paired_ratio([0.5, 0.5], [1.0, 1.0], [0, 0])
    assert ratio.value == pytest.approx(0.5)
    assert math.isnan(ratio.low)
    assert math.isnan(ratio.high)


def test_unequal_numbers_of_runs_are_refused():
    """Runs that are not pairs cannot be compared as pairs."""
    with pytest.raises(ValueError, match="not pairs"):
        paired_ratio([1.0], [1.0, 2.0])


@pytest.mark.parametrize("values", [[], [0.0], [math.nan]])
def test_ratio_without_positive_values_is_nan(values):
    """A figure that was not measured is NaN, never a number that looks measured."""
    assert math.isnan(paired_ratio(values, [1.0] * len(values)).value)


def test_a_ratio_of_two_samples_holds_the_truth():
    """Twice as much, with an interval around two that a larger sample makes narrower."""
    rng = np.random.default_rng(1)
    wide, narrow = (bootstrap_ratio(rng.normal(2, 0.3, n), rng.normal(1, 0.15, n)) for n in (20, 500))
    for ratio in (wide, narrow):
        assert ratio.low < 2.0 < ratio.high
    assert narrow.high - narrow.low < wide.high - wide.low
    assert math.isnan(bootstrap_ratio([], [1.0]).value)


def test_a_share_has_wilsons_interval():
    """9 of 10: 0.596 to 0.982 (Wilson 1927); all of 40 is not certainty."""
    ratio = share(9, 10)
    assert (round(ratio.low, 3), round(ratio.high, 3)) == (0.596, 0.982)
    assert share(40, 40).low < 1.0
    assert math.isnan(share(0, 0).value)
