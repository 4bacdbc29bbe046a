"""Verdicts and tables of the benchmarks."""

import pytest

from scripts.benchmarks.report import Comparison, Figure, markdown_table
from scripts.benchmarks.stats import Ratio

LOWER = Figure("TTFT p50, ms", "ttft_p50_ms", "lower", 1.02)
HIGHER = Figure("output tokens/s", "tokens_per_s", "higher", 0.98)


@pytest.mark.parametrize(
    ("figure", "low", "high", "verdict"),
    [
        (LOWER, 0.9, 1.01, "met"),
        (LOWER, 0.9, 1.03, "open"),
        (LOWER, 1.03, 1.2, "missed"),
        (HIGHER, 0.99, 1.2, "met"),
        (HIGHER, 0.9, 1.2, "open"),
        (HIGHER, 0.8, 0.97, "missed"),
        (Figure("TPOT", "tpot_p50_ms", "lower"), 0.8, 0.9, ""),
    ],
)
def test_verdict_needs_the_whole_interval_on_one_side(figure, low, high, verdict):
    """Met and missed are said only when the interval excludes the other; else the question is open."""
    assert Comparison(64, figure, 1.0, 1.0, Ratio((low + high) / 2, low, high)).verdict == verdict


def test_an_unmeasured_figure_has_no_verdict():
    """NaN is neither met nor missed."""
    nan = float("nan")
    assert Comparison(64, LOWER, nan, nan, Ratio(nan, nan, nan)).verdict == "no value"


def test_table_has_a_row_for_each_comparison():
    """Head, rule, and one row of equal cell count for each figure."""
    items = [Comparison(16, figure, 1.0, 2.0, Ratio(0.5, 0.4, 0.6)) for figure in (LOWER, HIGHER)]
    lines = markdown_table(items, "bare").splitlines()
    assert len(lines) == 4
    assert len({line.count("|") for line in lines}) == 1
    assert "0.500 [0.400, 0.600]" in lines[2]
