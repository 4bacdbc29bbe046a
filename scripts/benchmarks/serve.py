"""`bench serve`: Tokenring against SGLang's own server, in interleaved pairs within one run.

Both servers are up at once and take turns, so that the two runs of a pair are seconds apart on the same
machine. The idle one is frozen (SIGSTOP), because an idle SGLang scheduler polls without rest and would take
a core from the other. Both are started anew several times. After each start one pair is not measured. The
order alternates: ours, the peer, the peer, ours.
"""

from __future__ import annotations

import argparse
import contextlib
import shlex
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scripts.benchmarks import bare, engine_args, forest_plot, report, starts
from scripts.benchmarks.driver import (
    Recorded,
    RunResult,
    freeze_gc,
    record_load,
    run_load,
    served_model,
)
from scripts.benchmarks.load import LoadPlan
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import ServerProcess, free_port
from scripts.benchmarks.prompts import chat_work

PEER = "bare"
WARM_UP = -1


@dataclass(frozen=True, slots=True)
class Side:
    """One side of the comparison: a running server and where it takes chats."""

    server: ServerProcess
    path: str
    model: str


@dataclass(frozen=True, slots=True)
class Pair:
    """One turn of each side with the same prompts, in one start of the servers."""

    start: int
    ours: RunResult
    peer: RunResult


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench serve`."""
    parser.add_argument(
        "--streams", default="16,64", help="concurrent streams, comma-separated (default: 16,64)"
    )
    parser.add_argument("--pairs", type=int, default=18, help="measured pairs per load (default: 18)")
    starts.add_argument(parser)
    parser.add_argument(
        "--tokens", type=int, default=128, help="mean output tokens per request (default: 128)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="requests per stream and run (default: 3)")
    parser.add_argument("--prompt-words", type=int, default=40, help="words per prompt (default: 40)")
    parser.add_argument("--model", default="", help="path or hub id (default: the built-in model)")
    parser.add_argument("--tp", type=int, default=1, help="tensor parallel size")
    engine_args.add_argument(parser)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, machine and every run")
    forest_plot.add_flag(parser)
    parser.add_argument(
        "--ours-path",
        default="/api/chat/completions",
        help="where ours takes chats: /api stores each as a conversation (the default), /v1 none",
    )
    parser.add_argument("--ours-command", help="start ours with this command, {port} replaced")
    parser.add_argument("--peer-command", help="start the peer with this command, {port} replaced")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table, write what was asked for."""
    loads = [int(streams) for streams in arguments.streams.split(",")]
    machine = describe_machine()
    measured: dict[int, list[Pair]] = {streams: [] for streams in loads}
    commands: dict[str, list[str]] = {}
    turns = list(starts.spread(arguments.pairs, arguments.starts))
    try:
        for start, numbers in enumerate(turns):
            with (
                tempfile.TemporaryDirectory() as folder,
                _both_sides(arguments, Path(folder), (PEER, "ours") if start % 2 else ("ours", PEER)) as (
                    ours,
                    peer,
                ),
            ):
                commands = {"ours": ours.server.command, PEER: peer.server.command}
                for streams, pairs in measured.items():
                    for pair in measure_pairs(numbers, ours, peer, streams, arguments):
                        pairs.append(Pair(start, *pair))
    finally:  # cut short, a run still tells what it has
        _tell(arguments, machine, commands, {s: pairs for s, pairs in measured.items() if pairs})
    return 0


def _tell(
    arguments: argparse.Namespace,
    machine: dict[str, object],
    commands: dict[str, list[str]],
    measured: dict[int, list[Pair]],
) -> None:
    comparisons = [
        item for pairs in measured.values() for item in report.compare(report.SERVE_FIGURES, *_columns(pairs))
    ]
    print(report.markdown_table(comparisons, PEER))
    for streams, pairs in measured.items():
        print(_footnote(streams, pairs))
    if arguments.json:
        _write_json(arguments, machine, commands, measured, comparisons)
    if arguments.plot:
        title = f"Tokenring against SGLang's bare server, {machine['commit']}, {machine['date_utc']}"
        forest_plot.write_svg(arguments.plot, comparisons, title)


def measure_pairs(
    numbers: Iterable[int], ours: Side, peer: Side, streams: int, arguments: argparse.Namespace
) -> Iterator[tuple[RunResult, RunResult]]:
    """The pairs of those numbers, after a warm-up pair; the prompts of a pair are the same on both sides."""
    for number in (WARM_UP, *numbers):
        first, second = (ours, peer) if number % 2 == 0 else (peer, ours)
        results = {side.server.name: _turn(side, streams, number, arguments) for side in (first, second)}
        pair = results["ours"], results[PEER]
        if number != WARM_UP:
            yield pair
            print(_progress(number, *pair), file=sys.stderr)  # once it is kept, whatever ends the run now


def _turn(side: Side, streams: int, pair: int, arguments: argparse.Namespace) -> RunResult:
    seed = 1_000_000 * streams + pair + 1
    work = chat_work(
        side.model,
        streams * arguments.rounds,
        mean_tokens=arguments.tokens,
        prompt_words=arguments.prompt_words,
        seed=seed,
    )
    plan = LoadPlan("127.0.0.1", side.server.port, side.path, work.bodies, work.output_tokens, streams)
    recorded = take_turn(side.server, plan)
    recorded.check_whole()
    return recorded.result()


def take_turn(server: ServerProcess, plan: LoadPlan) -> Recorded:
    """Load a server that is frozen before and after."""
    server.thaw()
    try:
        run_load(server, _wake_up(plan))
        return record_load(server, plan)
    finally:
        server.freeze()


def _wake_up(plan: LoadPlan) -> LoadPlan:
    """One unmeasured request after the thaw, in which timers that fell due in the freeze fire."""
    body = plan.bodies[0].replace('"content": "', '"content": "wake up ', 1)
    return LoadPlan(plan.host, plan.port, plan.path, [body], plan.output_tokens[:1], 1)


@contextlib.contextmanager
def _both_sides(
    arguments: argparse.Namespace, folder: Path, order: Sequence[str]
) -> Iterator[tuple[Side, Side]]:
    """Ours and the peer, started in that order, up and frozen."""
    with contextlib.ExitStack() as stack:
        sides = {}
        for name in order:
            server = _server(name, arguments, folder)
            stack.callback(server.stop)
            print(f"starting {name}: {shlex.join(server.command)}", file=sys.stderr)
            server.start()
            server.wait_ready()
            path = arguments.ours_path if name == "ours" else "/v1/chat/completions"
            if server.ready_path == "/health":
                freeze_gc(server.port)
            sides[name] = Side(server, path, served_model(server.port))
            server.freeze()
        yield sides["ours"], sides[PEER]


def _server(name: str, arguments: argparse.Namespace, folder: Path) -> ServerProcess:
    port, passed = free_port(), engine_args.parse(arguments.engine_args)
    override = arguments.ours_command if name == "ours" else arguments.peer_command
    if override:
        command = shlex.split(override.replace("{port}", str(port)))
    elif name == "ours":
        command = our_command(
            port, folder / "data", model=arguments.model, tp=arguments.tp, server_args=passed
        )
    else:
        command = bare.peer_command(arguments.model, port, tp=arguments.tp, server_args=passed)
    return ServerProcess(name, command, port, folder / f"{name}.log")


def our_command(
    port: int, data_dir: Path, *, model: str, tp: int = 1, server_args: Mapping[str, Any] | None = None
) -> list[str]:
    """How ours is started: every setting at its default but where and what it serves, and one.

    The prompts are words in no order, of which the screens would refuse one in some hundreds:
    they judge all the same, and only take note.
    """
    policy = data_dir.with_name("policy.toml")
    policy.write_text('action = "flag"\n')
    command = [sys.executable, "-m", "app", "serve", "--port", str(port), "--data-dir", str(data_dir)]
    command += ["--safety-policy", str(policy)]
    if model:
        command += ["--model", model]
    if server_args:
        config = data_dir.with_name("tokenring.toml")
        config.write_text(engine_args.config(server_args))
        command += ["--config", str(config)]
    return command if tp == 1 else [*command, "--tp", str(tp)]


def _columns(pairs: list[Pair]) -> tuple[list[RunResult], list[RunResult], list[int]]:
    return [pair.ours for pair in pairs], [pair.peer for pair in pairs], [pair.start for pair in pairs]


def _progress(number: int, ours: RunResult, peer: RunResult) -> str:
    return (
        f"{ours.streams} streams, pair {number + 1}: CPU/token {ours.serving_cpu_us_per_token:.1f} : "
        f"{peer.serving_cpu_us_per_token:.1f} us, "
        f"{ours.tokens_per_s:.0f} : {peer.tokens_per_s:.0f} tokens/s, "
        f"TTFT p50 {ours.ttft_p50_ms:.0f} : {peer.ttft_p50_ms:.0f} ms, "
        f"others used {ours.other_cpus:.2f} : {peer.other_cpus:.2f} CPUs"
    )


def _footnote(streams: int, pairs: list[Pair]) -> str:
    ours, peer, begun = _columns(pairs)
    others = [run.other_cpus for run in ours + peer]
    return (
        f"{streams} streams: {len(pairs)} pairs of {ours[0].output_tokens} tokens "
        f"in {len(set(begun))} starts, every stream whole; "
        f"same text {report.same_text_share(ours, peer):.0%}; "
        f"other processes used {min(others):.2f} to {max(others):.2f} CPUs"
    )


def _write_json(
    arguments: argparse.Namespace,
    machine: dict[str, object],
    commands: dict[str, list[str]],
    measured: dict[int, list[Pair]],
    comparisons: list[report.Comparison],
) -> None:
    options = ("streams", "pairs", "starts", "tokens", "rounds", "prompt_words", "ours_path", "engine_args")
    settings: dict[str, Any] = {
        "benchmark": "serve",
        "machine": machine,
        "options": {name: getattr(arguments, name) for name in options},
        "commands": commands,
        "comparisons": [report.comparison_record(item) for item in comparisons],
    }
    runs = [
        {"start": pair.start, **report.run_record(number, run)}
        for pairs in measured.values()
        for number, pair in enumerate(pairs)
        for run in (pair.ours, pair.peer)
    ]
    report.write_json(arguments.json, settings, runs)
