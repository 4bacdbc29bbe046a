"""A figure as one SVG for light and dark pages."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import matplotlib as mpl
from matplotlib.figure import Figure

from app.safety.evaluation import themed_svg


def drawn() -> str:
    """A figure of two lines."""
    with themed_svg.style():
        figure = Figure()
        axes = figure.subplots()
        axes.plot([0, 1], [0, 1], color=themed_svg.RED)
        axes.set_title("a title")
        return themed_svg.text_of(figure)


def test_the_same_figure_is_the_same_text():
    """No date, no version and no random name: a plot changes with its figures only."""
    assert drawn() == drawn()
    assert "Matplotlib" not in drawn()


def test_it_is_an_svg_without_a_prologue_whose_text_is_text():
    """It can stand within a page, and be searched."""
    assert drawn().startswith("<svg")
    assert "a title" in [element.text for element in ET.fromstring(drawn()).iter()]


def test_the_style_ends_with_the_figure():
    """Other figures of the process keep matplotlib's own colours."""
    before = mpl.rcParams["text.color"]
    drawn()
    assert mpl.rcParams["text.color"] == before
