"""`bench path`: Tokenring with a scripted engine against a bare ASGI app that sends ready-made frames.

A frame of ours has gone through engine, pipeline, ring, screens and encoder; a frame of the app is sent as it
is. A third server is ours without the screens. The server under test has one core to itself and the load
generator, which never sleeps, another, in interleaved turns as in `bench serve`. The figure is events per CPU
second of the server, that is, events/s on one core. Wall-clock time is not used: the app outruns one load
generator, and other processes may run on the machine. The other rows need no engine either: the screens by
themselves, settlements, thousands of open streams, and memory after many requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from app.store.database import Database
from scripts.benchmarks import connections, findings, forest_plot, memory, report, screen_cpu
from scripts.benchmarks import store_settlements as settlements
from scripts.benchmarks.driver import RunResult, run_load
from scripts.benchmarks.findings import Finding
from scripts.benchmarks.load import LoadPlan
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import ServerProcess, free_port
from scripts.benchmarks.prompts import chat_work
from scripts.benchmarks.serve import OURS, SCREENS_OFF, our_command
from scripts.benchmarks.stats import Ratio, paired_ratio

YARDSTICK = "ready-made"
PATH = "path"
SATURATED_STREAMS = 256
MAX_SCREENS_SHARE = 0.25
SETTLED_AT_ONCE = 64
EVENTS = report.Figure("events/s through the full path on one core", "frames_per_serving_cpu_s", "higher")
CPU = report.Figure("CPU per token, us", "serving_cpu_us_per_token", "lower")
OTHERS = (
    report.Figure("events/s", "frames_per_s", "higher"),
    report.Figure("frames per token", "frames_per_token", "higher"),
    report.Figure("server busy, CPUs", "serving_cpus", "higher"),
)
Turns = list[dict[str, RunResult]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench path`."""
    parser.add_argument(
        "--rows",
        default=",".join((PATH, *ROWS)),
        help="what to measure, comma-separated (default: all: %(default)s)",
    )
    parser.add_argument(
        "--streams", default="64,256", help="concurrent streams, comma-separated (default: 64,256)"
    )
    parser.add_argument("--pairs", type=int, default=9, help="measured turns per load (default: 9)")
    parser.add_argument("--tokens", type=int, default=200, help="tokens per request (default: 200)")
    parser.add_argument("--rounds", type=int, default=2, help="requests per stream and run (default: 2)")
    parser.add_argument("--open", type=int, default=10_000, help="streams held open (default: 10000)")
    parser.add_argument(
        "--requests", type=int, default=100_000, help="requests after which memory is read (default: 100000)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, machine and every run")
    forest_plot.add_flag(parser)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the tables, write what was asked for."""
    machine, turns = describe_machine(), list[dict[str, RunResult]]()
    rows = measure(arguments, turns)
    comparisons = compared(turns)
    if comparisons:
        print(f"{report.markdown_table(comparisons, YARDSTICK)}\n")
    print(findings.markdown(rows))
    if turns:
        runs = [run for turn in turns for run in turn.values()]
        others = [run.other_cpus for run in runs]
        print(
            f"\n{report.cpu_bars(runs)}\n\nother processes used {min(others):.2f} to {max(others):.2f} CPUs"
        )
    if arguments.json:
        settings = {"benchmark": "path", "machine": machine, "tokens": arguments.tokens}
        settings |= {"rounds": arguments.rounds, "rows": [[row.label, row.value] for row in rows]}
        settings["comparisons"] = [report.comparison_record(item) for item in comparisons]
        records = [
            report.run_record(number, run) for number, turn in enumerate(turns) for run in turn.values()
        ]
        report.write_json(arguments.json, settings, records)
    if arguments.plot:
        title = f"Full path against ready-made frames, {machine['commit']}"
        forest_plot.write_svg(arguments.plot, comparisons, title)
    return 0


def measure(arguments: argparse.Namespace, turns: Turns) -> list[Finding]:
    """The rows of section 9 of the design that were asked for; fills in the turns of the path."""
    wanted = arguments.rows.split(",")
    if unknown := set(wanted) - {PATH, *ROWS}:
        raise SystemExit(
            f"--rows: there is no {', '.join(sorted(unknown))}; have {', '.join((PATH, *ROWS))}."
        )
    rows: list[Finding] = []
    if PATH in wanted:
        with tempfile.TemporaryDirectory() as folder, _servers(arguments.tokens, Path(folder)) as servers:
            for streams in map(int, arguments.streams.split(",")):
                turns += _turns(servers, streams, arguments)
        rows += report.rows(compared(turns), YARDSTICK)
        rows += [_screens_share(streams, of_load) for streams, of_load in _by_load(turns).items()]
    for name in filter(wanted.__contains__, ROWS):
        print(f"measuring {name}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            rows += ROWS[name](arguments, Path(folder))
    return rows


def compared(turns: Turns) -> list[report.Comparison]:
    """Ours against the ready-made frames at every load."""
    comparisons = []
    for streams, of_load in _by_load(turns).items():
        ours, ready_made = ([turn[name] for turn in of_load] for name in (OURS, YARDSTICK))
        comparisons += report.compare(_figures(streams), ours, ready_made)
    return comparisons


def _figures(streams: int) -> tuple[report.Figure, ...]:
    """With the bound of the design at this load, which is one ratio, written as it is there."""
    if streams < SATURATED_STREAMS:
        return (replace(EVENTS, bound=0.5), CPU, *OTHERS)
    return (
        replace(CPU, label="CPU per token of the full path at saturation, us", bound=2.0),
        EVENTS,
        *OTHERS,
    )


def _screens_share(streams: int, turns: Turns) -> Finding:
    off, ours = ([turn[name].serving_cpu_us_per_token for turn in turns] for name in (SCREENS_OFF, OURS))
    rest = paired_ratio(off, ours)
    share = Ratio(1 - rest.value, 1 - rest.high, 1 - rest.low)
    label = f"screens' share of the full path, {streams} streams"
    return findings.judged(label, share, "lower", MAX_SCREENS_SHARE)


def _by_load(turns: Turns) -> Mapping[int, Turns]:
    loads = dict.fromkeys(turn[OURS].streams for turn in turns)
    return {streams: [turn for turn in turns if turn[OURS].streams == streams] for streams in loads}


def _turns(servers: list[ServerProcess], streams: int, arguments: argparse.Namespace) -> Turns:
    """The measured turns of one load, after one that is not; the order alternates."""
    tokens, requests = arguments.tokens, streams * arguments.rounds
    work = chat_work("scripted", requests, mean_tokens=tokens, prompt_words=40, seed=1, spread=0.0)
    _, load_cpus = split_cores()
    turns: Turns = []
    for number in range(-1, arguments.pairs):
        runs = {}
        for server in servers if number % 2 == 0 else servers[::-1]:
            path = "/api/chat/completions"
            bodies, output_tokens = work.bodies, work.output_tokens
            plan = LoadPlan("127.0.0.1", server.port, path, bodies, output_tokens, streams, awake=True)
            runs[server.name] = run_load(server, plan, load_cpus=load_cpus)
        if number >= 0:
            turns.append(runs)
            print(_progress(number, runs), file=sys.stderr)
    return turns


def split_cores() -> tuple[set[int], set[int]]:
    """One core for the server, another for the load. Raises RuntimeError where there is only one."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise RuntimeError("this benchmark needs two cores: one for the server, one for the load")
    return {cores[0]}, {cores[1]}


@contextlib.contextmanager
def _servers(tokens: int, folder: Path) -> Iterator[list[ServerProcess]]:
    servers = [_ours(OURS, tokens, folder), _ours(SCREENS_OFF, tokens, folder, "--safety", "off")]
    port = free_port()
    frames = [sys.executable, "-m", "scripts.benchmarks.frames_app", str(port), str(tokens)]
    servers.append(ServerProcess(YARDSTICK, frames, port, folder / "frames.log"))
    server_cpus, _ = split_cores()
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
            server.wait_ready()
            server.pin(server_cpus)
        yield servers


def _ours(name: str, tokens: int, folder: Path, *options: str) -> ServerProcess:
    port = free_port()
    command = our_command(port, folder / name / "data", model="")
    command += ["--engine", "scripted", "--scripted", f"rate=0,tokens={tokens},seed=1", *options]
    return ServerProcess(name, command, port, folder / f"{name}.log")


def _progress(number: int, runs: Mapping[str, RunResult]) -> str:
    figures = [
        f"{name} {run.serving_cpu_us_per_token:.1f} us of CPU a token, busy {run.serving_cpus:.2f} CPUs, "
        f"others {run.other_cpus:.2f}"
        for name, run in runs.items()
    ]
    return f"{next(iter(runs.values())).streams} streams, turn {number + 1}: {'; '.join(figures)}"


def _screens(_: argparse.Namespace, folder: Path) -> list[Finding]:
    """The screens by themselves, on answers of the scripted engine."""
    server = _ours(SCREENS_OFF, 200, folder, "--safety", "off")
    server.start()
    try:
        server.wait_ready()
        return screen_cpu.measure(
            server.port, chat_work("scripted", 64, mean_tokens=150, prompt_words=40, seed=1)
        )
    finally:
        server.stop()


def _settlements(arguments: argparse.Namespace, folder: Path) -> list[Finding]:
    """Settlements of many callers at once against one each, on a new file."""

    async def measured() -> settlements.Pairs:
        database = Database(folder)
        await database.open()
        try:
            return await settlements.measure_pairs(
                database, folder, SETTLED_AT_ONCE, arguments.pairs, 4096, answers=False
            )
        finally:
            await database.aclose()

    pairs = asyncio.run(measured())
    comparisons = report.compare(settlements.FIGURES, *settlements.columns(pairs))
    rows = report.rows(comparisons, "one commit each")
    label = f"durable settlements per second, {SETTLED_AT_ONCE} at once, against one commit each"
    return [replace(row, label=label) for row in rows]


def _open_streams(arguments: argparse.Namespace, folder: Path) -> list[Finding]:
    return connections.measure(arguments.open, folder)


def _memory(arguments: argparse.Namespace, folder: Path) -> list[Finding]:
    return memory.measure(_ours(OURS, 2, folder, "--retention-s", "1"), arguments.requests)


ROWS: Mapping[str, Callable[[argparse.Namespace, Path], list[Finding]]] = {
    "screens": _screens,
    "settlements": _settlements,
    "streams": _open_streams,
    "memory": _memory,
}
