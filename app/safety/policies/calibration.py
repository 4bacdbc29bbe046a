"""From a target false positive rate to a score: the calibration table that is shipped with the model.

A target is the share of ordinary texts that would reach *any* category, with all of them at that target.
Between the rows of the table a threshold lies on the line through its neighbours over the logarithm of
the rate; a target below the first row has that row's threshold.

    {"version": 1,
     "categories": {"S1": {"fpr": [0.001, …, 0.1], "threshold": [0.93, …, 0.31]}, …},
     "ngrams": {…}, "output": {…}}

`categories` is for n-grams and encoder together, `ngrams` (may be absent) for the n-grams alone,
`output` for answers, whose rate is that of whole replies. Other keys are the model's own.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from app.safety.categories import CATEGORIES
from app.settings import SettingsError

FILE_NAME = "calibration.json"
MODELS = Path(__file__).parents[1] / "models"
"""Directory of the bundled classifiers and their calibration table."""

Table = Literal["categories", "ngrams", "output"]


class CalibrationDamaged(SettingsError):
    """The calibration table is missing or wrong. The server does not start."""


class _Row(NamedTuple):
    log_fpr: Sequence[float]
    threshold: Sequence[float]


class Calibration:
    """The thresholds of every category by target."""

    def __init__(self, tables: Mapping[str, Mapping[str, _Row]]) -> None:
        self._tables = tables

    @classmethod
    def load(cls, path: Path) -> Calibration:
        """Read a calibration.json. Raises CalibrationDamaged."""
        try:
            return cls.parse(json.loads(path.read_bytes()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as exc:
            raise CalibrationDamaged(
                f"{path}: the calibration of the classifiers cannot be read: {exc}"
            ) from exc

    @classmethod
    def parse(cls, document: Any) -> Calibration:
        """A table of parsed JSON. Raises ValueError, KeyError, TypeError."""
        if document["version"] != 1:
            raise ValueError(f"version {document['version']!r}, expected 1")
        names = [name for name in ("categories", "ngrams", "output") if name != "ngrams" or name in document]
        return cls({name: {c: _row(document[name][c]) for c in CATEGORIES} for name in names})

    def at(self, table: Table, category: str, fpr: float) -> float:
        """The score that a text has to reach, for a target."""
        row = self._tables.get(table, self._tables["categories"])[category]
        x = math.log(fpr)
        right = bisect_left(row.log_fpr, x)
        if right == 0 or right == len(row.log_fpr):
            return row.threshold[min(right, len(row.threshold) - 1)]
        x0, x1 = row.log_fpr[right - 1 : right + 1]
        y0, y1 = row.threshold[right - 1 : right + 1]
        return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def _row(entry: Mapping[str, Sequence[float]]) -> _Row:
    fprs = [float(fpr) for fpr in entry["fpr"]]
    thresholds = [float(threshold) for threshold in entry["threshold"]]
    if not fprs or len(fprs) != len(thresholds):
        raise ValueError("rates and thresholds differ in number")
    if not all(0 < fpr < 1 for fpr in fprs) or fprs != sorted(set(fprs)):
        raise ValueError("rates do not rise between 0 and 1")
    if not all(0 < t <= 1 for t in thresholds) or thresholds != sorted(thresholds, reverse=True):
        raise ValueError("thresholds do not fall between 1 and 0")
    return _Row([math.log(fpr) for fpr in fprs], thresholds)
