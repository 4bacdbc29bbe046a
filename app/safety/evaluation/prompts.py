"""Figures of how well the screens separate harmful texts from benign ones, by labelled rows.

A row is a JSON object of a line: `text`, `label` (1 harmful, 0 benign), and if they are known `category`
and `source`. The score of a text is the highest of its categories, which is one scale over all of them.
Rates have the 95% interval of Wilson (1927).
"""

from __future__ import annotations

import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

from app.safety.categories import BY_CODE, CODE_OF
from app.safety.verdict import Action
from app.settings import SettingsError

TARGETS = (0.001, 0.005, 0.01, 0.02, 0.05, 0.1)
"""False positive rates at which recall is given, by thresholds on the benign rows."""
UNKNOWN = "unknown"
_Z = 1.959964


class Row(NamedTuple):
    """A labelled text."""

    text: str
    harmful: bool
    category: str
    source: str


class Judged(NamedTuple):
    """A row, and what the screens made of it; milliseconds of each."""

    row: Row
    score: float
    action: Action | None
    fast_ms: float
    full_ms: float


class Rows(NamedTuple):
    """The rows of some files, and how many others there were, by why they are left out."""

    rows: list[Row]
    skipped: Counter[str]


def read(paths: Iterable[Path], kind: str = "prompt") -> Rows:
    """The labelled rows of JSON-lines files, compressed or not. Raises SettingsError naming file and line."""
    rows: list[Row] = []
    skipped: Counter[str] = Counter()
    for path in paths:
        for number, line in _lines(path):
            try:
                entry = json.loads(line)
                text, label = entry["text"], entry["label"]
            except (ValueError, KeyError, TypeError) as exc:
                raise SettingsError(f"{path}, line {number}: no object with `text` and `label`") from exc
            if not isinstance(text, str) or label not in (0, 1, None):
                raise SettingsError(
                    f"{path}, line {number}: `text` is no text, or `label` is not 0, 1 or null"
                )
            if label is None:
                skipped["unlabelled"] += 1
            elif entry.get("kind", kind) != kind:
                skipped[f"no {kind}"] += 1
            else:
                category = str(entry.get("category") or UNKNOWN)
                source = str(entry.get("source") or path.name)
                rows.append(Row(text, label == 1, CODE_OF.get(category, category), source))
    return Rows(rows, skipped)


def report(judged: Sequence[Judged], timed: tuple[str, str] = ("fast", "full")) -> dict[str, Any]:
    """All figures: pooled, by source, and by category, whose harmful rows are set against all benign ones.

    `timed` are the names of the two latencies.
    """
    sources: dict[str, list[Judged]] = defaultdict(list)
    categories: dict[str, list[Judged]] = defaultdict(list)
    benign = [each for each in judged if not each.row.harmful]
    for each in judged:
        sources[each.row.source].append(each)
        if each.row.harmful:
            categories[each.row.category].append(each)
    return {
        "pooled": figures(judged),
        "sources": {name: figures(sources[name]) for name in sorted(sources)},
        "categories": {
            name: figures([*categories[name], *benign]) for name in sorted(categories, key=_order)
        },
        "latency_ms": {
            timed[0]: quantiles([each.fast_ms for each in judged]),
            timed[1]: quantiles([each.full_ms for each in judged]),
        },
    }


def figures(judged: Sequence[Judged]) -> dict[str, Any]:
    """Counts; recall and false positive rate as the policy acts, and over all thresholds."""
    harmful = sum(each.row.harmful for each in judged)
    benign = len(judged) - harmful
    report: dict[str, Any] = {"harmful": harmful, "benign": benign}
    for name, actions in (("blocked", ("block",)), ("watched", ("block", "watch"))):
        acted = [each for each in judged if each.action in actions]
        hits = sum(each.row.harmful for each in acted)
        report[name] = {
            "recall": rate(hits, harmful),
            "fpr": rate(len(acted) - hits, benign),
        }
    above = counts(judged)
    report["auc"] = round(auc(above), 4) if above else None
    report["ap"] = round(average_precision(above), 4) if above else None
    report["recall_at_fpr"] = {str(t): round(recall_at(above, t), 4) if above else None for t in TARGETS}
    return report


def rate(hits: int, of: int) -> dict[str, float] | None:
    """A share with its interval; None of nothing."""
    if not of:
        return None
    p, z2 = hits / of, _Z * _Z
    centre = (p + z2 / (2 * of)) / (1 + z2 / of)
    half = _Z * math.sqrt(p * (1 - p) / of + z2 / (4 * of * of)) / (1 + z2 / of)
    return {
        "rate": round(p, 4),
        "low": round(max(centre - half, 0.0), 4),
        "high": round(min(centre + half, 1.0), 4),
    }


def counts(judged: Sequence[Judged]) -> list[tuple[int, int]]:
    """Benign and harmful rows above every threshold, the strictest first; empty without both kinds."""
    totals: dict[float, tuple[int, int]] = defaultdict(lambda: (0, 0))
    for each in judged:
        benign, harmful = totals[each.score]
        totals[each.score] = (benign + (not each.row.harmful), harmful + each.row.harmful)
    steps = [totals[score] for score in sorted(totals, reverse=True)]
    above = list(accumulate(steps, lambda a, b: (a[0] + b[0], a[1] + b[1]), initial=(0, 0)))
    return above if min(above[-1]) else []


def auc(above: Sequence[tuple[int, int]]) -> float:
    """The chance that a harmful text scores above a benign one, ties counting half; of `counts`."""
    benign, harmful = above[-1]
    return sum((b2 - b1) * (h1 + h2) for (b1, h1), (b2, h2) in pairwise(above)) / (2 * benign * harmful)


def average_precision(above: Sequence[tuple[int, int]]) -> float:
    """The mean precision over the ranks of the harmful texts; equal scores are one rank."""
    return sum((h2 - h1) * h2 / (h2 + b2) for (_, h1), (b2, h2) in pairwise(above)) / above[-1][1]


def recall_at(above: Sequence[tuple[int, int]], fpr: float) -> float:
    """The share of harmful texts above the score that at most this share of benign ones is above."""
    benign, harmful = above[-1]
    return max(h for b, h in above if b <= fpr * benign + 1e-9) / harmful


def roc(judged: Sequence[Judged]) -> list[tuple[float, float]]:
    """False positive rate and recall at every threshold, the strictest first; empty without both kinds."""
    above = counts(judged)
    return [(b / above[-1][0], h / above[-1][1]) for b, h in above]


def quantiles(values: Sequence[float]) -> dict[str, float]:
    """The median, the 90th and 99th percentile and the maximum; zero of nothing."""
    ordered = sorted(values)
    return {
        name: round(ordered[min(int(q * len(ordered)), len(ordered) - 1)], 3) if ordered else 0.0
        for name, q in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0))
    }


def _order(category: str) -> tuple[int, str]:
    return (list(BY_CODE).index(category) if category in BY_CODE else len(BY_CODE), category)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        raw = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        lines = raw.decode().split("\n")
    except (OSError, EOFError, UnicodeDecodeError) as exc:
        raise SettingsError(f"{path} cannot be read: {getattr(exc, 'strerror', None) or exc}") from exc
    return ((number, line) for number, line in enumerate(lines, start=1) if line.strip())
