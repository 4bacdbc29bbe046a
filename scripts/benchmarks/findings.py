"""What a run found, each figure beside what it must be: a table to read, and the same as JSON."""

from __future__ import annotations

import json
import math
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from scripts.benchmarks.asking import Attempt
from scripts.benchmarks.stats import Ratio, percentile

ALLOWED = (200, 429, 503)
MAX_RETRY_S = 120
Better = Literal["lower", "higher"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the table. `verdict` is empty where nothing is attempt of the figure."""

    label: str
    value: str
    must: str = ""
    verdict: str = ""


def judged(label: str, ratio: Ratio, better: Better, bound: float) -> Finding:
    """A figure with its interval: `open` unless all of it is on one side of the bound."""
    value = "no value" if math.isnan(ratio.value) else shown(ratio)
    return Finding(label, value, bound_text(better, bound), verdict_of(ratio, better, bound))


def bound_text(better: Better, bound: float) -> str:
    """A bound as a table has it."""
    return f"{'≤' if better == 'lower' else '≥'} {bound:g}"


def verdict_of(ratio: Ratio, better: Better, bound: float) -> str:
    """`met` or `missed` where the whole interval is on one side of the bound, else `open`."""
    if math.isnan(ratio.value):
        return "open"
    if better == "lower":
        return "met" if ratio.high <= bound else "missed" if ratio.low > bound else "open"
    return "met" if ratio.low >= bound else "missed" if ratio.high < bound else "open"


def shown(ratio: Ratio) -> str:
    """A figure with its interval."""
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def none_of(label: str, count: float) -> Finding:
    """A count that must be 0."""
    return Finding(label, f"{count:g}", "0", "missed" if count else "met")


def within(label: str, value: float, bound: float, form: str = "{:.3g}") -> Finding:
    """A single figure, without an interval, that must not be more than `bound`."""
    verdict = "met" if value <= bound else "missed"
    return Finding(label, form.format(value), f"≤ {bound:g}", verdict)


def at_least(label: str, value: float, bound: float, form: str = "{:.3g}") -> Finding:
    """A single figure, without an interval, that must not be less than `bound`."""
    return Finding(label, form.format(value), f"≥ {bound:g}", "met" if value >= bound else "missed")


def unjudged(label: str, value: object, form: str = "{}") -> Finding:
    """A figure of which nothing is attempt."""
    return Finding(label, form.format(value))


def markdown(findings: Sequence[Finding]) -> str:
    """The findings as a Markdown table, aligned to be read as text too."""
    rows = [["figure", "found", "must", "verdict"]]
    rows += [[finding.label, finding.value, finding.must, finding.verdict] for finding in findings]
    return aligned(rows)


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Rows as a Markdown table, the heads first, each column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    lines.insert(1, " | ".join("-" * width for width in widths))
    return "\n".join(f"| {line} |" for line in lines)


def tell(text: str) -> None:
    """How far a run has come, beside the table."""
    print(text, file=sys.stderr, flush=True)


def missed(findings: Sequence[Finding]) -> bool:
    """Whether any bound was missed."""
    return any(finding.verdict == "missed" for finding in findings)


def write(path: Path, settings: Mapping[str, Any], findings: Sequence[Finding]) -> None:
    """Settings, machine and findings as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**settings, "findings": [asdict(finding) for finding in findings]}
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")


def statuses(seen: Sequence[Attempt]) -> list[Finding]:
    """What attempts ended in, and whether every refusal was one that clients can go by."""
    counts = Counter((attempt.status, attempt.code) for attempt in seen)
    rows = [
        unjudged(f"answers {status or 'none'} {code}".rstrip(), count)
        for (status, code), count in sorted(counts.items())
    ]
    broken = sum(
        n for (status, code), n in counts.items() if status not in ALLOWED or (status == 200 and code)
    )
    refused = [attempt for attempt in seen if attempt.status in (429, 503)]
    waits = [attempt.retry_after_s for attempt in refused if attempt.retry_after_s is not None]
    honest = sum(1 <= wait <= MAX_RETRY_S for wait in waits)
    return [
        *rows,
        none_of("attempts that ended in anything but 200, 429, 503", broken),
        none_of(f"refusals without Retry-After, or with more than {MAX_RETRY_S} s", len(refused) - honest),
        unjudged("Retry-After p50, p99, s", f"{percentile(waits, 50):.0f}, {percentile(waits, 99):.0f}"),
    ]


def retractions(count: float | None) -> Finding:
    """Requests that the engine set aside for lack of memory; None where the server does not show them."""
    label = "requests that the engine retracted"
    return Finding(label, "not shown by this server", "0", "open") if count is None else none_of(label, count)
