"""The plot of an evaluation: one SVG with its curve, its bars and its names, for light and dark pages."""

from __future__ import annotations

import xml.etree.ElementTree as ET

from app.safety.evaluation.plot import plot
from app.safety.evaluation.prompts import Judged, Row, report, roc

BENIGN = [Judged(Row("x", False, "S1", "a"), score / 10, None, 1.0, 1.0) for score in range(8)]
HARMFUL = [Judged(Row("x", True, "S1", "a"), 0.6 + score / 10, "block", 1.0, 1.0) for score in range(4)]


def svg_of(rows: list[Judged]) -> ET.Element:
    """The parsed plot of these rows."""
    return ET.fromstring(plot(report(rows), roc(rows)))


def texts(root: ET.Element) -> list[str]:
    """Every text of a plot."""
    return [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]


def ids(root: ET.Element) -> set[str]:
    """The marked elements of a plot."""
    return {identifier for element in root.iter() if (identifier := element.get("id"))}


def test_the_plot_has_the_curve_and_both_axes():
    """The ROC curve on a logarithmic axis of false positives, the sources beside it."""
    root = svg_of([*BENIGN, *HARMFUL])
    assert "roc" in ids(root)
    assert {"all rows", "recall", "false positive rate", "a", "100%"} <= set(texts(root))


def test_without_both_kinds_of_rows_there_is_no_curve():
    """The bars are drawn all the same."""
    root = svg_of(HARMFUL)
    assert "roc" not in ids(root)
    assert "a" in texts(root)


def test_names_of_sources_stand_as_they_are():
    """Markup and formulas are text, and a long name is cut."""
    rows = [*BENIGN, HARMFUL[0]._replace(row=Row("x", True, "S1", "<a & b>" + "x" * 40))]
    rows.append(HARMFUL[0]._replace(row=Row("x", True, "S1", "$a_b$")))
    shown = texts(svg_of(rows))
    assert "<a & b>" + "x" * 20 + "…" in shown
    assert "$a_b$" in shown


def test_each_colour_has_one_for_dark_pages():
    """A style sheet in the file swaps every colour that the figure uses."""
    root = svg_of([*BENIGN, *HARMFUL])
    sheet = next(element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}style"))
    assert "prefers-color-scheme: dark" in sheet
    styles = " ".join(element.get("style", "") for element in root.iter())
    used = {word.strip(";") for word in styles.split() if word.startswith("#")}
    assert used
    assert all(f'fill: {colour}"]' in sheet for colour in used)
