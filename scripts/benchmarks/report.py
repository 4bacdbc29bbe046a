"""From runs to ratios, a table and a JSON file; the plot is forest_plot's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, Protocol

from scripts.benchmarks.driver import RunResult
from scripts.benchmarks.findings import Better, Finding, aligned, bound_text, shown, verdict_of
from scripts.benchmarks.stats import Ratio, paired_ratio

BAR_WIDTH = 50
"""Characters of the longest bar."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: its place in a run, which way is better, what the ratio must not pass."""

    label: str
    attribute: str
    better: Better
    bound: float | None = None


CPU_FIGURE = Figure("CPU per output token, us", "serving_cpu_us_per_token", "lower")
SERVE_FIGURES = (
    replace(CPU_FIGURE, bound=0.6),
    Figure("user part of it, us", "serving_user_us_per_token", "lower"),
    Figure("output tokens/s", "tokens_per_s", "higher", 0.98),
    Figure("TTFT p50, ms", "ttft_p50_ms", "lower", 1.02),
    Figure("TTFT p99, ms", "ttft_p99_ms", "lower", 1.05),
    Figure("TPOT p50, ms", "tpot_p50_ms", "lower"),
    Figure("ITL p50, ms", "itl_p50_ms", "lower"),
    Figure("ITL p99, ms", "itl_p99_ms", "lower", 1.05),
    Figure("frames per token", "frames_per_token", "higher", 0.995),
)


@dataclass(frozen=True, slots=True)
class Comparison:
    """One figure at one load: medians of both sides and the paired ratio ours/peer."""

    streams: int
    figure: Figure
    ours: float
    peer: float
    ratio: Ratio

    @property
    def verdict(self) -> str:
        """`met` or `missed` where the whole interval is on one side of the bound, else `open`."""
        bound = self.figure.bound
        if bound is None:
            return ""
        return (
            "no value" if math.isnan(self.ratio.value) else verdict_of(self.ratio, self.figure.better, bound)
        )


class Loaded(Protocol):
    """What any run has beside its figures: its load, in streams or whatever was at once."""

    @property
    def streams(self) -> int:
        """How many there were at once."""
        ...


def compare(
    figures: Iterable[Figure],
    ours: Sequence[Loaded],
    peer: Sequence[Loaded],
    starts: Sequence[int] | None = None,
) -> list[Comparison]:
    """Every figure over the pairs of one load; `starts` as in `paired_ratio`."""
    comparisons = []
    for figure in figures:
        a = [float(getattr(run, figure.attribute)) for run in ours]
        b = [float(getattr(run, figure.attribute)) for run in peer]
        ratio = paired_ratio(a, b, starts)
        comparisons.append(Comparison(ours[0].streams, figure, median(a), median(b), ratio))
    return comparisons


def same_text_share(ours: Sequence[RunResult], peer: Sequence[RunResult]) -> float:
    """The share of prompts both servers answered with the same text."""
    matches = [
        a == b
        for run, other in zip(ours, peer, strict=True)
        for a, b in zip(run.text_sha256, other.text_sha256, strict=True)
    ]
    return sum(matches) / len(matches)


def markdown_table(
    comparisons: Sequence[Comparison], peer: str, *, ours: str = "ours", load: str = "streams"
) -> str:
    """The comparisons as a Markdown table, aligned to be read as text too."""
    rows = [[load, "figure", ours, peer, f"{ours}/{peer} [95%]", "must", "verdict"]]
    for item in comparisons:
        bound = item.figure.bound
        must = "" if bound is None else bound_text(item.figure.better, bound)
        cells = [str(item.streams), item.figure.label, f"{item.ours:.4g}", f"{item.peer:.4g}"]
        cells.append(shown(item.ratio))
        rows.append([*cells, must, item.verdict])
    return aligned(rows)


def rows(comparisons: Iterable[Comparison], peer: str) -> list[Finding]:
    """The comparisons that have a bound, as rows of section 9 of the design: ratio, ours, the peer's."""
    return [
        Finding(
            f"{item.figure.label}, {item.streams} streams, against {peer}",
            f"{shown(item.ratio)}: {item.ours:.4g} and {item.peer:.4g}",
            bound_text(item.figure.better, item.figure.bound),
            item.verdict,
        )
        for item in comparisons
        if item.figure.bound is not None
    ]


def cpu_bars(runs: Iterable[RunResult]) -> str:
    """CPU per output token against the number of streams, as bars of text: medians of the servers' runs."""
    by_load: dict[tuple[int, str], list[float]] = {}
    for run in runs:
        by_load.setdefault((run.streams, run.server), []).append(run.serving_cpu_us_per_token)
    heights = {load: median(values) for load, values in by_load.items()}
    highest = max(heights.values())
    lines = [
        f"{streams:>7}  {server:<12} {'█' * max(1, round(BAR_WIDTH * height / highest))} {height:.1f}"
        for (streams, server), height in sorted(heights.items(), key=lambda item: item[0][0])
    ]
    return "\n".join(["streams  server       CPU per output token, us", *lines])


def write_json(path: Path, settings: Mapping[str, Any], runs: Sequence[Mapping[str, Any]]) -> None:
    """Everything a reader needs to check the table: settings, machine and each run."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**settings, "runs": list(runs)}, indent=1) + "\n")


def run_record(pair: int, run: RunResult) -> dict[str, Any]:
    """One run as it goes into the result file."""
    return {"pair": pair, **asdict(run)}


def comparison_record(item: Comparison) -> dict[str, Any]:
    """One comparison as it goes into the result file."""
    return {**asdict(item), "verdict": item.verdict}
