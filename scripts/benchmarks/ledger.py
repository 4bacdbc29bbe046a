"""`bench ledger`: what the ledger costs: Tokenring with it on and off, in interleaved pairs within one run.

The scripted engine sends its first token after a fixed prefill time and the others at a fixed rate. With a
prefill, the reservation is written meanwhile, and TTFT must not show it. Without one (`--prefill-ms 0`) TTFT
waits for the disk; it is shown and has no bound. Every request makes a conversation, as `/api` does.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.benchmarks import report
from scripts.benchmarks.driver import RunResult, run_load
from scripts.benchmarks.load import LoadPlan
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import ServerProcess, free_port
from scripts.benchmarks.prompts import chat_work

ON, OFF = "on", "off"
MODULES = {ON: "app", OFF: "scripts.benchmarks.ledger_off"}
TTFT_BOUND = 1.02
FIGURES = (
    report.Figure("TTFT p50, ms", "ttft_p50_ms", "lower", TTFT_BOUND),
    report.Figure("TTFT p99, ms", "ttft_p99_ms", "lower"),
    report.Figure("CPU per token, us", "serving_cpu_us_per_token", "lower"),
    report.Figure("output tokens/s", "tokens_per_s", "higher"),
    report.Figure("ITL p50, ms", "itl_p50_ms", "lower"),
    report.Figure("ITL p99, ms", "itl_p99_ms", "lower"),
)
UNBOUND = (report.Figure("TTFT p50, ms", "ttft_p50_ms", "lower"), *FIGURES[1:])
Pairs = list[tuple[RunResult, RunResult]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench ledger`."""
    parser.add_argument("--streams", type=int, default=200, help="concurrent streams (default: 200)")
    parser.add_argument("--pairs", type=int, default=9, help="measured pairs per prefill (default: 9)")
    parser.add_argument("--tokens", type=int, default=64, help="mean output tokens per request (default: 64)")
    parser.add_argument("--rounds", type=int, default=4, help="requests per stream and run (default: 4)")
    parser.add_argument("--rate", type=int, default=40, help="tokens/s of a stream (default: 40)")
    parser.add_argument("--prefill-ms", default="50,0", help="prefill times, comma-separated (default: 50,0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings, machine and every run")


def run(arguments: argparse.Namespace) -> int:
    """Measure, print a table for each prefill, write what was asked for."""
    machine = describe_machine()
    measured: dict[int, Pairs] = {}
    for prefill_ms in map(int, arguments.prefill_ms.split(",")):
        with tempfile.TemporaryDirectory() as folder, _both(arguments, prefill_ms, Path(folder)) as sides:
            measured[prefill_ms] = _measure(sides, arguments)
    compared = {prefill_ms: _compared(prefill_ms, pairs) for prefill_ms, pairs in measured.items()}
    for prefill_ms, comparisons in compared.items():
        print(f"\nprefill {prefill_ms} ms:\n")
        print(report.markdown_table(comparisons, OFF, ours=ON))
        print(_footnote(measured[prefill_ms]))
    if arguments.json:
        options = ("streams", "pairs", "tokens", "rounds", "rate", "prefill_ms")
        settings: dict[str, object] = {
            "benchmark": "ledger",
            "machine": machine,
            "options": {name: getattr(arguments, name) for name in options},
            "comparisons": [
                {"prefill_ms": prefill_ms, **report.comparison_record(item)}
                for prefill_ms, comparisons in compared.items()
                for item in comparisons
            ],
        }
        runs = [
            {"prefill_ms": prefill_ms, **report.run_record(number, run)}
            for prefill_ms, pairs in measured.items()
            for number, pair in enumerate(pairs)
            for run in pair
        ]
        report.write_json(arguments.json, settings, runs)
    return 0


def _compared(prefill_ms: int, pairs: Pairs) -> list[report.Comparison]:
    figures = FIGURES if prefill_ms else UNBOUND
    return report.compare(figures, [on for on, _ in pairs], [off for _, off in pairs])


def _measure(sides: tuple[ServerProcess, ServerProcess], arguments: argparse.Namespace) -> Pairs:
    """Pairs in turns, after one that is not measured; both sides of a pair get the same requests."""
    pairs = []
    for number in range(-1, arguments.pairs):
        work = chat_work(
            "scripted",
            arguments.streams * arguments.rounds,
            mean_tokens=arguments.tokens,
            prompt_words=40,
            seed=number + 2,
        )
        results = {}
        for server in sides if number % 2 == 0 else sides[::-1]:
            path = "/api/chat/completions"
            plan = LoadPlan(
                "127.0.0.1", server.port, path, work.bodies, work.output_tokens, arguments.streams
            )
            results[server.name] = run_load(server, plan)
        if number >= 0:
            pairs.append((results[ON], results[OFF]))
            print(_progress(number, *pairs[-1]), file=sys.stderr)
    return pairs


@contextlib.contextmanager
def _both(
    arguments: argparse.Namespace, prefill_ms: int, folder: Path
) -> Iterator[tuple[ServerProcess, ServerProcess]]:
    script = f"rate={arguments.rate},prefill_s={prefill_ms / 1000},tokens={2 * arguments.tokens},seed=1"
    with contextlib.ExitStack() as stack:
        sides = []
        for name in (ON, OFF):
            port = free_port()
            options = ["--port", str(port), "--data-dir", str(folder / name), "--log-level", "warning"]
            options += ["--engine", "scripted", "--scripted", script]
            command = [sys.executable, "-m", MODULES[name], "serve", *options]
            server = ServerProcess(name, command, port, folder / f"{name}.log", ready_path="/readyz")
            stack.callback(server.stop)
            server.start()
            server.wait_ready()
            sides.append(server)
        yield sides[0], sides[1]


def _progress(number: int, on: RunResult, off: RunResult) -> str:
    return (
        f"pair {number + 1}: TTFT p50 {on.ttft_p50_ms:.1f} : {off.ttft_p50_ms:.1f} ms, "
        f"CPU/token {on.serving_cpu_us_per_token:.1f} : {off.serving_cpu_us_per_token:.1f} us, "
        f"others used {on.other_cpus:.2f} : {off.other_cpus:.2f} CPUs"
    )


def _footnote(pairs: Pairs) -> str:
    others = [run.other_cpus for pair in pairs for run in pair]
    on, _ = pairs[0]
    return (
        f"{len(pairs)} pairs of {on.requests} requests, {on.output_tokens} tokens; every stream whole; "
        f"other processes used {min(others):.2f} to {max(others):.2f} CPUs"
    )
