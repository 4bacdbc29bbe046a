"""A figure of matplotlib's as one SVG for light and dark pages: a style sheet in it swaps the colours.

matplotlib is no dependency of the server: only `--plot` imports this, and the scripts.
"""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

INK: Final = "#222222"
GRID: Final = "#d8d8d8"
RED: Final = "#b3261e"
BLUE: Final = "#1a6ba8"
GREEN: Final = "#2e7d32"
AMBER: Final = "#b26a00"
_PAGE = "#ffffff"
_DARK = {
    INK: "#e6e6e6",
    GRID: "#3d444d",
    RED: "#ff8a80",
    BLUE: "#79c0ff",
    GREEN: "#7ee787",
    AMBER: "#e3b341",
    _PAGE: "#161b22",
}
"""The colours on a dark page; a figure uses no others."""


def is_available() -> bool:
    """True if matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def style() -> Iterator[None]:
    """The colours and fonts in which figures are made and saved; text stays text."""
    import matplotlib as mpl

    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    settings = dict.fromkeys(inked, INK) | {
        "axes.facecolor": _PAGE,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "figure.facecolor": _PAGE,
        "font.size": 9,
        "grid.color": GRID,
        "legend.frameon": False,
        "svg.fonttype": "none",
        "svg.hashsalt": "tokenring",  # ids that do not change from file to file
    }
    with mpl.rc_context(settings):
        yield


def text_of(figure: object) -> str:
    """The SVG of a `matplotlib.figure.Figure`."""
    from matplotlib.figure import Figure

    assert isinstance(figure, Figure)
    out = io.StringIO()
    unsaid = dict.fromkeys(("Creator", "Date", "Format", "Type"))  # the same figure is the same file
    figure.savefig(out, format="svg", bbox_inches="tight", metadata=unsaid)
    svg = out.getvalue()
    head, opening, rest = svg[svg.index("<svg") :].partition("<defs>")
    return f"{head}{_dark_style()}{opening}{rest}"


def _dark_style() -> str:
    rules = "".join(
        f'[style*="{what}: {light}"]{{{what}:{dark} !important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    return f"<style>@media (prefers-color-scheme: dark){{{rules}}}</style>\n "
