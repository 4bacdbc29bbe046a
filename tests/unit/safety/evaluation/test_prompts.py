"""The figures of an evaluation, against what they are by definition, and the files they come from."""

from __future__ import annotations

import gzip
import itertools
import json
import random

import pytest

from app.safety.evaluation.prompts import (
    Judged,
    Row,
    auc,
    average_precision,
    counts,
    figures,
    rate,
    read,
    recall_at,
    report,
    roc,
)
from app.settings import SettingsError


def judged(score: float, *, harmful: bool, action=None, category="S1", source="a", ms: float = 1.0) -> Judged:
    """A row that was judged so."""
    return Judged(Row("x", harmful, category, source), score, action, ms, 10 * ms)


def drawn(seed: int) -> list[Judged]:
    """Rows whose scores overlap, many of them equal."""
    rng = random.Random(seed)
    found = []
    for i in range(60):
        harmful = i % 3 == 0
        found.append(
            judged(round(min(max(rng.gauss(0.6 if harmful else 0.4, 0.2), 0), 1), 1), harmful=harmful)
        )
    return found


@pytest.mark.parametrize("seed", range(5))
def test_auc_is_the_chance_of_a_right_order(seed):
    """Over all pairs, ties count half."""
    rows = drawn(seed)
    harmful = sorted(each.score for each in rows if each.row.harmful)
    benign = sorted(each.score for each in rows if not each.row.harmful)
    pairs = [(p > q) + (p == q) / 2 for p in harmful for q in benign]
    assert auc(counts(rows)) == pytest.approx(sum(pairs) / len(pairs))


@pytest.mark.parametrize("seed", range(5))
def test_average_precision_is_the_area_by_steps(seed):
    """The sum over thresholds of precision times what recall gains there."""
    rows = drawn(seed)
    harmful = sorted(each.score for each in rows if each.row.harmful)
    benign = sorted(each.score for each in rows if not each.row.harmful)
    area, before = 0.0, 0.0
    for threshold in sorted({each.score for each in rows}, reverse=True):
        hits, alarms = (sum(p >= threshold for p in scores) for scores in (harmful, benign))
        area += (hits / len(harmful) - before) * hits / (hits + alarms)
        before = hits / len(harmful)
    assert average_precision(counts(rows)) == pytest.approx(area)


@pytest.mark.parametrize("fpr", [0.0, 0.01, 0.05, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("seed", range(3))
def test_recall_is_at_no_more_than_the_target(seed, fpr):
    """It is the most that a threshold gives whose false positives are within the target."""
    rows = drawn(seed)
    harmful = sorted(each.score for each in rows if each.row.harmful)
    benign = sorted(each.score for each in rows if not each.row.harmful)
    best = max(
        sum(p > t for p in harmful) / len(harmful)
        for t in [-1.0, *(each.score for each in rows)]
        if sum(p > t for p in benign) <= fpr * len(benign)
    )
    assert recall_at(counts(rows), fpr) == pytest.approx(best)


def test_figures_say_what_the_policy_did():
    """Recall and false positives of what is blocked, and of what is blocked or watched."""
    found = figures(
        [
            judged(0.9, harmful=True, action="block"),
            judged(0.5, harmful=True, action="watch"),
            judged(0.4, harmful=True, action="flag"),
            judged(0.1, harmful=True),
            judged(0.5, harmful=False, action="watch"),
            judged(0.0, harmful=False),
        ]
    )
    rates = [found[how][which]["rate"] for how in ("blocked", "watched") for which in ("recall", "fpr")]
    assert rates == [0.25, 0.0, 0.5, 0.5]
    assert (found["harmful"], found["benign"]) == (4, 2)


def test_one_kind_alone_has_no_curve():
    """A source without benign rows has a recall, and nothing that needs both."""
    found = figures([judged(0.9, harmful=True, action="block")])
    assert found["blocked"] == {"recall": {"rate": 1.0, "low": 0.2065, "high": 1.0}, "fpr": None}
    assert (found["auc"], found["ap"], found["recall_at_fpr"]["0.01"]) == (None, None, None)
    assert roc([judged(0.9, harmful=True)]) == []


def test_an_interval_holds_its_rate():
    """Wilson's: 65 of 100 is 0.553 to 0.736; of nothing there is none."""
    assert rate(65, 100) == {"rate": 0.65, "low": 0.5525, "high": 0.7364}
    assert rate(0, 0) is None


def test_a_report_is_by_source_and_category():
    """A category's harmful rows are set against all benign ones; latencies are quantiles."""
    rows = [
        judged(0.9, harmful=True, category="S2", source="b", ms=2.0),
        judged(0.8, harmful=True, category="JB", source="a"),
        judged(0.1, harmful=False, category="unknown", source="a"),
    ]
    found = report(rows)
    assert list(found["sources"]) == ["a", "b"]
    assert list(found["categories"]) == ["S2", "JB"]
    assert found["categories"]["S2"]["auc"] == 1.0
    assert found["latency_ms"]["fast"] == {"p50": 1.0, "p90": 2.0, "p99": 2.0, "max": 2.0}


@pytest.mark.parametrize("seed", range(3))
def test_the_curve_rises_from_nothing_to_all(seed):
    """From (0, 0) to (1, 1), never back; its area is the AUC."""
    rows = drawn(seed)
    curve = roc(rows)
    assert (curve[0], curve[-1]) == ((0.0, 0.0), (1.0, 1.0))
    assert curve == sorted(curve)
    area = sum((x1 - x0) * (y0 + y1) / 2 for (x0, y0), (x1, y1) in itertools.pairwise(curve))
    assert area == pytest.approx(report(rows)["pooled"]["auc"], abs=1e-4)


def test_rows_come_from_files(tmp_path):
    """Compressed or not; categories by name are known by their codes; the others are left out and counted."""
    rows = [
        {"text": "a", "label": 1, "category": "self_harm", "source": "s", "kind": "prompt"},
        {"text": "b", "label": 0},
        {"text": "c", "label": None, "kind": "prompt"},
        {"text": "d", "label": 1, "kind": "output"},
    ]
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (tmp_path / "plain.jsonl").write_text(lines + "\n")
    (tmp_path / "packed.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = read([tmp_path / "plain.jsonl", tmp_path / "packed.jsonl.gz"])
    assert found.rows[:2] == [Row("a", True, "S11", "s"), Row("b", False, "unknown", "plain.jsonl")]
    assert len(found.rows) == 4
    assert found.skipped == {"unlabelled": 2, "no prompt": 2}


@pytest.mark.parametrize(
    "line", ["{", "[]", "5", '{"text": "a"}', '{"text": 5, "label": 1}', '{"text": "a", "label": 2}']
)
def test_a_line_that_is_no_row_is_named(tmp_path, line):
    """With its file and number; the text is not quoted."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"text": "a", "label": 1}\n' + line + "\n")
    with pytest.raises(SettingsError, match=r"rows\.jsonl, line 2"):
        read([path])


@pytest.mark.parametrize("name", ["nowhere.jsonl", "torn.jsonl.gz"])
def test_a_file_that_cannot_be_read_is_named(tmp_path, name):
    """Absent, or not what its name says."""
    (tmp_path / "torn.jsonl.gz").write_bytes(gzip.compress(b"x" * 100)[:20])
    with pytest.raises(SettingsError, match=name):
        read([tmp_path / name])
