"""An evaluation as one SVG: the ROC curve, and beside it recall and false positives of every source."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

WIDTH, HEIGHT = 1040, 420
_LEFT, _TOP, _SIDE = 60, 30, 340
_BARS, _BAR_WIDTH, _ROW = 600, 360, 18
_MIN_FPR = 0.001
_HARMFUL, _BENIGN, _INK, _GRID = "#b3261e", "#1a6ba8", "#222222", "#d8d8d8"


def plot(report: Mapping[str, Any], curve: Sequence[tuple[float, float]]) -> str:
    """The SVG of a report (app.safety.evaluation.prompts) and of its pooled ROC curve."""
    sources = report["sources"]
    height = max(HEIGHT, _TOP + 2 * _ROW + _ROW * len(sources) + 40)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}">',
        f'<g font-family="sans-serif" font-size="11" fill="{_INK}">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_axes(),
        *_curve(curve),
        *_bars(sources),
        "</g></svg>",
    ]
    return "\n".join(parts) + "\n"


def _x(fpr: float) -> float:
    """A rate on the logarithmic axis; what is below its beginning stands there."""
    return _LEFT + _SIDE * (1 - math.log10(max(fpr, _MIN_FPR)) / math.log10(_MIN_FPR))


def _y(recall: float) -> float:
    return _TOP + _SIDE * (1 - recall)


def _axes() -> Iterator[str]:
    for fpr in (0.001, 0.01, 0.1, 1.0):
        yield _line(_x(fpr), _TOP, _x(fpr), _TOP + _SIDE)
        yield _text(_x(fpr), _TOP + _SIDE + 15, f"{fpr:g}", "middle")
    for step in range(6):
        y = _y(step / 5)
        yield _line(_LEFT, y, _LEFT + _SIDE, y)
        yield _text(_LEFT - 6, y + 4, f"{step / 5:g}", "end")
    yield _text(_LEFT + _SIDE / 2, _TOP + _SIDE + 32, "false positive rate", "middle")
    yield _text(_LEFT, _TOP - 10, "recall, all rows")


def _curve(curve: Sequence[tuple[float, float]]) -> Iterator[str]:
    if curve:
        points = " ".join(f"{_x(fpr):.1f},{_y(recall):.1f}" for fpr, recall in _thinned(curve))
        yield f'<polyline points="{points}" fill="none" stroke="{_HARMFUL}" stroke-width="2"/>'


def _thinned(curve: Sequence[tuple[float, float]]) -> Iterator[tuple[float, float]]:
    """At most one point per half pixel."""
    last = (-1.0, -1.0)
    for fpr, recall in curve:
        at = (_x(fpr), _y(recall))
        if math.dist(at, last) >= 0.5 or fpr == 1.0:
            yield fpr, recall
            last = at


def _bars(sources: Mapping[str, Any]) -> Iterator[str]:
    yield _text(_BARS, _TOP - 10, "blocked, by source (pale: watched too)")
    for i, (name, figures) in enumerate(sources.items()):
        y = _TOP + i * _ROW
        yield _text(_BARS - 8, y + 11, _short(name), "end")
        for key, colour in (("recall", _HARMFUL), ("fpr", _BENIGN)):
            found = [figures[how][key] for how in ("watched", "blocked")]
            if found[0] is None:
                continue
            height = 6 if figures["harmful"] and figures["benign"] else 12
            top = y + (7 if key == "fpr" and height == 6 else 1)
            for rate, opacity in zip(found, (0.3, 1.0), strict=True):
                yield (
                    f'<rect x="{_BARS}" y="{top}" width="{_BAR_WIDTH * rate["rate"]:.1f}" height="{height}"'
                    f' fill="{colour}" opacity="{opacity}"/>'
                )
    y = _TOP + len(sources) * _ROW + 14
    yield _line(_BARS, _TOP, _BARS, y - 10)
    yield _text(
        _BARS - 160,
        y + 6,
        "red: of harmful rows, recall; blue: of benign rows, false positives; full width: 100%",
    )


def _short(name: str) -> str:
    return name if len(name) <= 28 else f"{name[:27]}…"


def _line(x0: float, y0: float, x1: float, y1: float) -> str:
    return f'<line x1="{x0:.1f}" y1="{y0:.1f}" x2="{x1:.1f}" y2="{y1:.1f}" stroke="{_GRID}"/>'


def _text(x: float, y: float, text: str, anchor: str = "start") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'
