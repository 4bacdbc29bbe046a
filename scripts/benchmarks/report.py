"""From runs to ratios, a table and a JSON file; the plot is forest_plot's."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal, Protocol

from scripts.benchmarks.driver import RunResult
from scripts.benchmarks.findings import aligned
from scripts.benchmarks.stats import Ratio, paired_ratio


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured figure: its place in a run, which way is better, what the ratio must not pass."""

    label: str
    attribute: str
    better: Literal["lower", "higher"]
    bound: float | None = None


SERVE_FIGURES = (
    Figure("CPU per output token, us", "serving_cpu_us_per_token", "lower", 0.6),
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
        bound, ratio = self.figure.bound, self.ratio
        if bound is None:
            return ""
        if math.isnan(ratio.value):
            return "no value"
        if self.figure.better == "lower":
            return "met" if ratio.high <= bound else "missed" if ratio.low > bound else "open"
        return "met" if ratio.low >= bound else "missed" if ratio.high < bound else "open"


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
        sign = "≤" if item.figure.better == "lower" else "≥"
        ratio = f"{item.ratio.value:.3f} [{item.ratio.low:.3f}, {item.ratio.high:.3f}]"
        must = "" if item.figure.bound is None else f"{sign} {item.figure.bound:g}"
        cells = [str(item.streams), item.figure.label, f"{item.ours:.4g}", f"{item.peer:.4g}", ratio]
        rows.append([*cells, must, item.verdict])
    return aligned(rows)


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
