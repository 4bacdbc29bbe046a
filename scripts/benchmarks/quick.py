"""`scripts/bench --quick`: the rows that matter, in five minutes on two cores.

`serve` at 16 and 64 streams and `path` at 64 and 256, three turns each within one start, so that an interval
says nothing of another start, and the screens by themselves.
"""

from __future__ import annotations

import argparse
import time

from scripts.benchmarks import findings, path, report, serve
from scripts.benchmarks.driver import RunResult
from scripts.benchmarks.machine import cpu_model

SERVE = ["--streams", "16,64", "--pairs", "3", "--starts", "1", "--tokens", "96", "--rounds", "2"]
PATH = ["--rows", "path,screens", "--pairs", "3", "--tokens", "64", "--rounds", "1"]
BUSY_CPUS = 0.2
"""CPUs used by others above which the figures are said to be those of a busy machine."""


def run(more: list[str]) -> int:
    """Measure, print one table and the CPU per token against the number of streams; 0 whatever was found.

    `more` are further options of `bench serve`.
    """
    began_s = time.monotonic()
    options = _parsed(serve, [*SERVE, *more])
    measured = serve.empty(options)
    serve.measure(options, measured)
    turns: path.Turns = []
    rows = [*measured.rows(), *path.measure(_parsed(path, PATH), turns)]
    runs = [*measured.runs(), *(run for turn in turns for run in turn.values())]
    print(findings.markdown(rows))
    print(f"\nwith SGLang:\n{report.cpu_bars(measured.runs())}")
    print(f"\nwith the scripted engine, saturated:\n{report.cpu_bars(runs[len(measured.runs()) :])}\n")
    print("\n".join([*measured.notes(), _machine(runs, time.monotonic() - began_s)]))
    return 0


def _parsed(module: object, options: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/bench --quick")
    module.add_arguments(parser)  # type: ignore[attr-defined]
    return parser.parse_args(options)


def _machine(runs: list[RunResult], took_s: float) -> str:
    others = max(run.other_cpus for run in runs)
    quiet = "a quiet machine" if others < BUSY_CPUS else "a BUSY machine: CPU per token and TTFT are too high"
    return f"took {took_s:.0f} s on {cpu_model()}; others used at most {others:.2f} CPUs: {quiet}"
