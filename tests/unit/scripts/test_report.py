"""Verdicts and tables of the benchmarks."""

import dataclasses

import pytest

from scripts.benchmarks.driver import RunResult
from scripts.benchmarks.report import Comparison, Figure, cpu_bars, markdown_table, rows
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


def test_the_rows_of_the_design_are_the_figures_with_a_bound():
    """Each says against what, and has both medians behind the ratio."""
    unbound = Figure("ITL p50, ms", "itl_p50_ms", "lower")
    items = [Comparison(16, figure, 1.0, 2.0, Ratio(0.5, 0.4, 0.6)) for figure in (LOWER, unbound)]
    [row] = rows(items, "bare")
    assert row.label == "TTFT p50, ms, 16 streams, against bare"
    assert row.value == "0.500 [0.400, 0.600]: 1 and 2"
    assert (row.must, row.verdict) == ("≤ 1.02", "met")


def test_bars_are_as_long_as_the_medians():
    """In the order of the loads, the highest being the longest."""
    numbers = {field.name: 1.0 for field in dataclasses.fields(RunResult)}
    loads = [(64, "ours", 10.0), (16, "ours", 40.0), (16, "bare", 30.0), (16, "bare", 10.0)]
    runs = [
        RunResult(**{**numbers, "streams": streams, "server": server, "serving_cpu_us_per_token": us})
        for streams, server, us in loads
    ]
    _, *lines = cpu_bars(runs).splitlines()
    assert [line.split()[:2] for line in lines] == [["16", "ours"], ["16", "bare"], ["64", "ours"]]
    assert [line.count("█") for line in lines] == [50, 25, 12]
    assert lines[1].endswith(" 20.0")
