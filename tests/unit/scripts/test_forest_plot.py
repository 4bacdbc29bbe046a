"""The plot of the benchmarks: what was measured, by name, for light and dark pages."""

from __future__ import annotations

import argparse
import importlib.util
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from scripts.benchmarks import forest_plot
from scripts.benchmarks.report import Comparison, Figure
from scripts.benchmarks.stats import Ratio

LOWER = Figure("TTFT p50, ms", "ttft_p50_ms", "lower", 1.02)
HIGHER = Figure("output tokens/s", "tokens_per_s", "higher", 0.98)
NAN = float("nan")
MEASURED = [
    Comparison(16, LOWER, 1.0, 2.0, Ratio(0.5, 0.4, 0.6)),
    Comparison(16, HIGHER, 1.0, 2.0, Ratio(NAN, NAN, NAN)),
]


def test_the_plot_has_a_dot_and_a_name_for_each_measured_figure(tmp_path: Path):
    """The SVG parses; a figure without a value has no row, and the title is text as it is."""
    path = tmp_path / "plots" / "plot.svg"
    forest_plot.write_svg(path, MEASURED, "a < b & $c$")
    root = ET.parse(path).getroot()
    assert [e.get("id") for e in root.iter() if (e.get("id") or "").startswith("ratio_")] == ["ratio_0"]
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert {"a < b & $c$", "16 streams: TTFT p50, ms", "0.500 met"} <= set(texts)
    assert not any("output tokens/s" in (text or "") for text in texts)


def test_nothing_measured_is_a_plot_without_rows(tmp_path: Path):
    """A run cut short has no figures, and its report is written all the same."""
    forest_plot.write_svg(tmp_path / "plot.svg", MEASURED[1:], "empty")
    assert "ratio_0" not in (tmp_path / "plot.svg").read_text()


def test_the_same_figures_are_the_same_file(tmp_path: Path):
    """No date and no random name: a plot in the repository changes with its figures only."""
    for name in ("a.svg", "b.svg"):
        forest_plot.write_svg(tmp_path / name, MEASURED, "title")
    assert (tmp_path / "a.svg").read_bytes() == (tmp_path / "b.svg").read_bytes()


def test_a_plot_is_refused_at_once_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """A benchmark runs for minutes: what it lacks is named before."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda _name: None)
    parser = argparse.ArgumentParser()
    forest_plot.add_flag(parser)
    with pytest.raises(SystemExit):
        parser.parse_args(["--plot", "plot.svg"])
    assert "needs matplotlib; run scripts/setup --dev" in capsys.readouterr().err
