"""`bench path`: Tokenring with a scripted engine against a bare ASGI app that sends ready-made frames.

A frame of ours has gone through engine, pipeline, ring and encoder; a frame of the app is sent as it is. The
server under test has one core to itself and the load generator another, in interleaved pairs as in `bench
serve`. The figure is events per CPU second of the server, that is, events/s on one core. Wall-clock time is
not used: the app outruns one load generator, and other processes may run on the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks import forest_plot, report
from scripts.benchmarks.driver import RunResult, run_load
from scripts.benchmarks.load import LoadPlan
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import ServerProcess, free_port
from scripts.benchmarks.prompts import chat_work

YARDSTICK = "ready-made"
FIGURES = (
    report.Figure("events per CPU second", "frames_per_serving_cpu_s", "higher", 0.5),
    report.Figure("events/s", "frames_per_s", "higher"),
    report.Figure("CPU per token, us", "serving_cpu_us_per_token", "lower"),
    report.Figure("frames per token", "frames_per_token", "higher"),
    report.Figure("server busy, CPUs", "serving_cpus", "higher"),
)
Pairs = list[tuple[RunResult, RunResult]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench path`."""
    parser.add_argument("--streams", default="64", help="concurrent streams, comma-separated (default: 64)")
    parser.add_argument("--pairs", type=int, default=9, help="measured pairs per load (default: 9)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per request (default: 200)")
    parser.add_argument("--rounds", type=int, default=4, help="requests per stream and run (default: 4)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, machine and every run")
    forest_plot.add_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder, _servers(arguments.tokens, Path(folder)) as servers:
        measured = [
            pair
            for streams in arguments.streams.split(",")
            for pair in _measure(servers, int(streams), arguments)
        ]
    loads = sorted({ours.streams for ours, _ in measured})
    comparisons = []
    for streams in loads:
        pairs = [pair for pair in measured if pair[0].streams == streams]
        comparisons += report.compare(FIGURES, [ours for ours, _ in pairs], [other for _, other in pairs])
    print(report.markdown_table(comparisons, YARDSTICK))
    if arguments.json:
        settings = {
            "benchmark": "path",
            "machine": machine,
            "tokens": arguments.tokens,
            "rounds": arguments.rounds,
        }
        settings["comparisons"] = [report.comparison_record(item) for item in comparisons]
        runs = [report.run_record(number, run) for number, pair in enumerate(measured) for run in pair]
        report.write_json(arguments.json, settings, runs)
    if arguments.plot:
        forest_plot.write_svg(
            arguments.plot, comparisons, f"Full path against ready-made frames, {machine['commit']}"
        )
    return 0


def _measure(
    servers: tuple[ServerProcess, ServerProcess], streams: int, arguments: argparse.Namespace
) -> Pairs:
    work = chat_work(
        "scripted",
        streams * arguments.rounds,
        mean_tokens=arguments.tokens,
        prompt_words=40,
        seed=1,
        spread=0.0,
    )
    _, load_cpus = split_cores()
    pairs = []
    for number in range(-1, arguments.pairs):
        order = servers if number % 2 == 0 else servers[::-1]
        results = {}
        for server in order:
            path = "/api/chat/completions"
            plan = LoadPlan("127.0.0.1", server.port, path, work.bodies, work.output_tokens, streams)
            results[server.name] = run_load(server, plan, load_cpus=load_cpus)
        if number >= 0:
            pairs.append((results["ours"], results[YARDSTICK]))
            print(_progress(number, *pairs[-1]), file=sys.stderr)
    return pairs


def split_cores() -> tuple[set[int], set[int]]:
    """One core for the server, another for the load. Raises RuntimeError where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("this benchmark needs two cores: one for the server, one for the load")
    return {cores[0]}, {cores[1]}


@contextlib.contextmanager
def _servers(tokens: int, folder: Path) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    port, other_port = free_port(), free_port()
    script = f"rate=0,tokens={tokens},seed=1"
    options = [
        "--port",
        str(port),
        "--data-dir",
        str(folder / "data"),
        "--engine",
        "scripted",
        "--scripted",
        script,
    ]
    ours = ServerProcess("ours", [sys.executable, "-m", "app", "serve", *options], port, folder / "ours.log")
    frames = [sys.executable, "-m", "scripts.benchmarks.frames_app", str(other_port), str(tokens)]
    yardstick = ServerProcess(YARDSTICK, frames, other_port, folder / "frames.log")
    server_cpus, _ = split_cores()
    with contextlib.ExitStack() as stack:
        for server in (ours, yardstick):
            stack.callback(server.stop)
            server.start()
            server.wait_ready()
            server.pin(server_cpus)
        yield ours, yardstick


def _progress(number: int, ours: RunResult, other: RunResult) -> str:
    return (
        f"{ours.streams} streams, pair {number + 1}: "
        f"{ours.frames_per_s:.0f} : {other.frames_per_s:.0f} events/s, "
        f"server busy {ours.serving_cpus:.2f} : {other.serving_cpus:.2f} CPUs, "
        f"others used {ours.other_cpus:.2f} : {other.other_cpus:.2f}"
    )
