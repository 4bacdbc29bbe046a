"""Verdicts, tables and plots of the benchmarks."""

import xml.etree.ElementTree as ET

import pytest

from scripts.benchmarks.report import Comparison, Figure, markdown_table, write_svg
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


def test_plot_is_well_formed_and_shows_what_was_measured(tmp_path):
    """The SVG parses, has a dot for each measured figure and none for a NaN."""
    nan = float("nan")
    items = [
        Comparison(16, LOWER, 1.0, 2.0, Ratio(0.5, 0.4, 0.6)),
        Comparison(16, HIGHER, 1.0, 2.0, Ratio(nan, nan, nan)),
    ]
    write_svg(tmp_path / "plots" / "plot.svg", items, "a < b & c")
    tree = ET.parse(tmp_path / "plots" / "plot.svg")
    assert len(tree.findall(".//{http://www.w3.org/2000/svg}circle")) == 1
