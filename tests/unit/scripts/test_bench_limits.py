"""The most tokens of a minute, as `bench limits` counts them."""

from __future__ import annotations

from scripts.benchmarks.limits import SKEW_S, WINDOW_S, most_within


def test_the_fullest_window_counts() -> None:
    """Wherever it begins; what is a window apart is in two."""
    window_s = WINDOW_S - SKEW_S
    assert most_within([]) == 0
    assert most_within([(0.0, 5), (window_s, 7)]) == 7
    assert most_within([(0.0, 5), (window_s - 0.1, 7), (window_s + 1, 9), (3 * window_s, 12)]) == 16
