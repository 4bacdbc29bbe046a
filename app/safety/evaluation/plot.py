"""An evaluation as one SVG: the ROC curve, and beside it recall and false positives of every source."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from app.safety.evaluation import themed_svg
from app.safety.evaluation.themed_svg import BLUE, RED

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_MIN_FPR = 0.001
"""The beginning of the logarithmic axis; lower rates stand there."""
_WIDTH_IN, _MIN_HEIGHT_IN, _SOURCE_IN = 11.0, 4.4, 0.24
_NAME_CHARS = 28
_RATES = (("recall", RED, -1), ("fpr", BLUE, 1))
"""A rate's name, its colour, and on which side of a source's line its bar is, where there are both."""


def plot(report: Mapping[str, Any], curve: Sequence[tuple[float, float]]) -> str:
    """The SVG of a report (app.safety.evaluation.prompts) and of its pooled ROC curve."""
    from matplotlib.figure import Figure

    sources = report["sources"]
    height_in = max(_MIN_HEIGHT_IN, 1.2 + _SOURCE_IN * len(sources))
    with themed_svg.style():
        figure = Figure(figsize=(_WIDTH_IN, height_in), layout="constrained")
        left, right = figure.subplots(1, 2)
        _draw_curve(left, curve)
        _draw_bars(right, sources)
        return themed_svg.text_of(figure)


def _draw_curve(axes: Axes, curve: Sequence[tuple[float, float]]) -> None:
    axes.set(xscale="log", xlim=(_MIN_FPR, 1), ylim=(0, 1), xlabel="false positive rate", ylabel="recall")
    axes.set_title("all rows", loc="left")
    axes.grid(visible=True)
    if curve:
        rates = [max(fpr, _MIN_FPR) for fpr, _ in curve]
        axes.plot(rates, [recall for _, recall in curve], color=RED, linewidth=2, gid="roc")


def _draw_bars(axes: Axes, sources: Mapping[str, Any]) -> None:
    axes.set(xlim=(0, 1), xlabel="red: of harmful rows, recall; blue: of benign rows, false positives")
    axes.set_title("blocked, by source (pale: watched too)", loc="left")
    axes.xaxis.set_major_formatter("{x:.0%}")
    axes.set_yticks(range(len(sources)), [_short(name) for name in sources])
    axes.set_ylim(len(sources) - 0.5, -0.5)
    for line, figures in enumerate(sources.values()):
        both = bool(figures["harmful"] and figures["benign"])
        for key, colour, side in _RATES:
            for how, opacity in (("watched", 0.3), ("blocked", 1.0)):
                share = figures[how][key]
                if share is not None:
                    at, thickness = (line + 0.2 * side, 0.36) if both else (line, 0.72)
                    axes.barh(at, share["rate"], thickness, color=colour, alpha=opacity)


def _short(name: str) -> str:
    """A source's name as it is: a dollar sign begins no formula."""
    shown = name if len(name) <= _NAME_CHARS else f"{name[: _NAME_CHARS - 1]}…"
    return shown.replace("$", r"\$")
