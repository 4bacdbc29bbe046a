"""Ratios with their intervals as an SVG: a forest plot, one row a figure."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from app.safety.evaluation import themed_svg
from app.safety.evaluation.themed_svg import AMBER, BLUE, GREEN, INK, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from scripts.benchmarks.report import Comparison

_WIDTH_IN, _ROW_IN, _FRAME_IN = 8.6, 0.24, 1.1
_TICKS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
_VERDICT_COLOUR = {"met": GREEN, "missed": RED, "open": AMBER}


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Add `--plot`, refused at once where matplotlib is missing."""
    parser.add_argument("--plot", type=_path, metavar="FILE.svg", help="write the ratios as a plot")


def _path(text: str) -> Path:
    if not themed_svg.is_available():
        raise argparse.ArgumentTypeError("needs matplotlib; run scripts/setup --dev")
    return Path(text)


def write_svg(path: Path, comparisons: Sequence[Comparison], title: str) -> None:
    """Ratios with their intervals, one row each, on a log scale with a line at 1 and a tick at each bound."""
    from matplotlib.figure import Figure

    shown = [item for item in comparisons if not math.isnan(item.ratio.low)]
    with themed_svg.style():
        figure = Figure(figsize=(_WIDTH_IN, _FRAME_IN + _ROW_IN * len(shown)), layout="constrained")
        axes = figure.subplots()
        _draw_frame(axes, shown, title)
        for row, item in enumerate(shown):
            _draw_row(axes, row, item)
        svg = themed_svg.text_of(figure)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(svg, "utf-8")


def _draw_frame(axes: Axes, shown: Sequence[Comparison], title: str) -> None:
    edges = [edge for item in shown for edge in (item.ratio.low, item.ratio.high, item.figure.bound or 1.0)]
    low, high = min([0.5, *edges]) / 1.05, max([2.0, *edges]) * 1.05
    ticks = [tick for tick in _TICKS if low <= tick <= high]
    axes.set(xscale="log", xlim=(low, high), ylim=(max(len(shown), 1) - 0.5, -0.5))
    axes.set_title(title, loc="left", parse_math=False)
    axes.set_xlabel("ratio ours/peer, bootstrap 95% interval")
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.set_xticks([], minor=True)
    axes.set_yticks(range(len(shown)), [f"{item.streams} streams: {item.figure.label}" for item in shown])
    axes.tick_params(axis="y", length=0)
    axes.grid(visible=True, axis="x")
    axes.axvline(1.0, color=INK, linewidth=0.8)


def _draw_row(axes: Axes, row: int, item: Comparison) -> None:
    colour = _VERDICT_COLOUR.get(item.verdict, INK)
    ratio, bound = item.ratio, item.figure.bound
    if bound is not None:
        axes.plot([bound, bound], [row - 0.35, row + 0.35], color=BLUE, linewidth=2)
    axes.plot([ratio.low, ratio.high], [row, row], color=colour, linewidth=2)
    axes.plot(ratio.value, row, "o", color=colour, markersize=6, gid=f"ratio_{row}")
    axes.annotate(
        f"{ratio.value:.3f} {item.verdict}", (1.02, row), xycoords=("axes fraction", "data"), va="center"
    )
