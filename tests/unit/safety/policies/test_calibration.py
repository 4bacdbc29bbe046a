"""The calibration table: which score a target false positive rate stands for, and tables that cannot be."""

from __future__ import annotations

import json

import pytest

from app.safety.categories import CATEGORIES
from app.safety.policies.calibration import FILE_NAME, Calibration, CalibrationDamaged
from tests.support.policies import NGRAMS, PROMPTS, calibration, write_models


def test_a_row_of_the_table_is_itself():
    """At a rate that the table has, the threshold is the one beside it."""
    thresholds = Calibration.parse(calibration())
    assert thresholds.at("categories", "S1", 0.05) == pytest.approx(PROMPTS[0.05])
    assert thresholds.at("ngrams", "JB", 0.1) == pytest.approx(NGRAMS[0.1])


def test_between_rows_it_is_a_line_over_the_logarithm():
    """Half way between 0.001 and 0.01, in orders of magnitude, is half way between their thresholds."""
    at = Calibration.parse(calibration()).at("ngrams", "S1", 10**-2.5)
    assert at == pytest.approx((NGRAMS[0.001] + NGRAMS[0.01]) / 2)


def test_beyond_the_table_is_its_end():
    """A rate below the first row has that row's threshold, one above the last that one's."""
    thresholds = Calibration.parse(calibration())
    assert thresholds.at("categories", "S1", 0.0001) == PROMPTS[0.001]
    assert thresholds.at("categories", "S1", 0.5) == PROMPTS[0.1]


def test_the_ngrams_may_have_no_table_of_their_own():
    """Then they are held to the table of both."""
    document = calibration()
    del document["ngrams"]
    assert Calibration.parse(document).at("ngrams", "S1", 0.002) == pytest.approx(PROMPTS[0.002])


@pytest.mark.parametrize(
    ("fpr", "threshold"),
    [
        ([], []),
        ([0.1], [0.5, 0.6]),
        ([0.1, 0.01], [0.5, 0.6]),
        ([0.01, 0.1], [0.5, 0.6]),
        ([0.01, 0.1], [0.6, 0.0]),
        ([0.01, 0.1], [float("nan"), 0.5]),
        ([0.0, 0.1], [0.6, 0.5]),
        ([0.01, "x"], [0.6, 0.5]),
    ],
)
def test_a_table_that_cannot_be_right_is_refused(tmp_path, fpr, threshold):
    """Unequal, unsorted, out of range or no numbers: refused at start, with the name of the file."""
    document = calibration()
    document["output"]["S7"] = {"fpr": fpr, "threshold": threshold}
    (tmp_path / FILE_NAME).write_text(json.dumps(document))
    with pytest.raises(CalibrationDamaged, match=r"calibration\.json"):
        Calibration.load(tmp_path / FILE_NAME)


@pytest.mark.parametrize("text", [None, "", "[]", '{"version": 2}', '{"version": 1}', "\xff"])
def test_a_file_that_is_none_is_refused(tmp_path, text):
    """Absent, empty, of another version or without tables."""
    if text is not None:
        (tmp_path / FILE_NAME).write_text(text, "latin-1")
    with pytest.raises(CalibrationDamaged, match=r"calibration\.json"):
        Calibration.load(tmp_path / FILE_NAME)


def test_no_category_may_be_missing(tmp_path):
    """A category without thresholds would never be blocked."""
    write_models(tmp_path)
    for category in CATEGORIES:
        document = calibration()
        del document["categories"][category]
        with pytest.raises(KeyError):
            Calibration.parse(document)
