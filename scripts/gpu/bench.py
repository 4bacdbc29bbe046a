"""Stage `bench`: ours against SGLang's own server on the same GPU, model and arguments, in pairs."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from scripts.benchmarks import engine_args
from scripts.benchmarks.driver import RunResult
from scripts.benchmarks.findings import judged, shown
from scripts.benchmarks.report import SERVE_FIGURES, Comparison, compare
from scripts.gpu import workload
from scripts.gpu.state import Checkup
from scripts.gpu.tools import run_tool

STREAMS, DRY_STREAMS = "64,256", "2"
HEADS = ("streams", "figure", "ours", "bare SGLang", "ours/bare [95%]")


def run(check: Checkup) -> None:
    """See the module."""
    file = check.work / "bench.json"
    arguments = ["-m", "scripts.benchmarks", "serve", "--starts", "1", "--json", str(file)]
    if check.options.dry_run:
        arguments += ["--streams", DRY_STREAMS, "--pairs", "1", "--rounds", "1", "--tokens", "16"]
    else:
        arguments += ["--streams", STREAMS, "--pairs", str(check.options.pairs), "--rounds", "2"]
    arguments += _served(check)
    try:
        run_tool(arguments, check.left_s(), check.work / "bench.log", on_line=check.tell)
    finally:  # cut short, it has written the pairs that it has
        if file.exists():
            keep(check, json.loads(file.read_text()))


def keep(check: Checkup, measured: Mapping[str, Any]) -> None:
    """Compare the pairs; the interval is over pairs, and says nothing of another start of the servers."""
    by_load: dict[int, list[RunResult]] = {}
    for record in measured["runs"]:
        run = RunResult(**{name: record[name] for name in RunResult.__slots__})
        by_load.setdefault(run.streams, []).append(run)
    for runs in by_load.values():
        for item in compare(SERVE_FIGURES, runs[::2], runs[1::2]):
            _keep(check, item)
    check.keep("commands", measured["commands"])


def _keep(check: Checkup, item: Comparison) -> None:
    figure, streams = item.figure, item.streams
    row = (streams, figure.label, item.ours, item.peer, shown(item.ratio))
    check.add_row("Ours against bare SGLang", HEADS, row)
    if figure.bound is not None and check.options.model != "scripted":
        label = f"{figure.label}, {streams} streams, ours/bare"
        check.find(judged(label, item.ratio, figure.better, figure.bound))


def _served(check: Checkup) -> list[str]:
    """What both sides serve, as options of `bench serve`."""
    if check.options.model == "scripted":  # two of ours: the path of a dry run, and no comparison
        ours, peer = (_scripted(check.work / side) for side in ("ours", "peer"))
        return ["--ours-command", ours, "--peer-command", peer]
    model = workload.model_path(check.options, check.work)
    server_args = workload.model_args(check.options, workload.BENCH_POOL_TOKENS)
    return ["--model", model, *engine_args.options(server_args)]


def _scripted(data_dir: Path) -> str:
    command = workload.scripted_command(0, data_dir)
    return shlex.join([sys.executable, *command]).replace("--port 0", "--port {port}")
