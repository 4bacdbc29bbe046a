"""How a benchmark's pairs are spread over the starts of its servers."""

import pytest

from scripts.benchmarks.serve import spread


@pytest.mark.parametrize(
    ("pairs", "starts", "sizes"),
    [(9, 9, [1] * 9), (15, 9, [1, 2, 2, 1, 2, 2, 1, 2, 2]), (2, 9, [1, 1]), (5, 1, [5])],
)
def test_every_pair_is_measured_once_in_its_order(pairs, starts, sizes):
    """No start is without a pair, and none has two more than another."""
    ranges = list(spread(pairs, starts))
    assert [number for numbers in ranges for number in numbers] == list(range(pairs))
    assert [len(numbers) for numbers in ranges] == sizes


@pytest.mark.parametrize(("pairs", "starts"), [(0, 9), (9, 0)])
def test_a_run_that_would_measure_nothing_is_refused(pairs, starts):
    """No pairs, or no servers."""
    with pytest.raises(SystemExit, match="measure nothing"):
        list(spread(pairs, starts))
