"""The gate on coverage reads what was measured and names the package that has too little."""

from pathlib import Path

from coverage import Coverage

from scripts.support.coverage_gate import ROOT, THRESHOLDS, failures, measured


def test_too_little_coverage_is_named() -> None:
    """A package under its threshold is a sentence; one that just reaches it is none."""
    told = failures({"app/a/*": 79.9, "app/b/*": 80.0}, {"app/a/*": 80, "app/b/*": 80})
    assert told == ["app/a/* has 79.9% branch coverage, less than 80%"]


def test_what_was_measured_is_read_by_package(tmp_path: Path) -> None:
    """The data file's lines and branches become the percentage of a pattern."""
    data = Coverage(data_file=str(tmp_path / "data"), branch=True)
    data.get_data().add_arcs({str(ROOT / "app" / "core.py"): [(-1, 1)]})
    data.save()
    percents = measured({"app/core.py": 0}, str(tmp_path / "data"))
    assert 0 <= percents["app/core.py"] < 5


def test_each_threshold_is_of_files_that_exist() -> None:
    """A package that moves takes its threshold with it."""
    assert all(list(ROOT.glob(pattern)) for pattern in THRESHOLDS)
