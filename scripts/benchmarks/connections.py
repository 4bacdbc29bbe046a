"""`bench connections`: thousands of open streams on one process, one event per second each.

The scripted engine times each stream by itself. Streams start spread over the ramp, so their events are
spread over the second. Reported are delivery, the delay of events, and memory per stream.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.benchmarks.driver import dialogue
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.open_streams import StreamsPlan
from scripts.benchmarks.processes import ServerProcess, free_port, machine_busy_s
from scripts.benchmarks.prompts import chat_work

SPARE_FILES = 200
MAX_DELAY_P99_MS = 100
MAX_BYTES_PER_STREAM = 64 * 1024


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench connections`."""
    parser.add_argument("--streams", type=int, default=10_000, help="open streams (default: 10000)")
    parser.add_argument(
        "--ramp", type=int, default=30, metavar="S", help="seconds to open them in (default: 30)"
    )
    parser.add_argument("--watch", type=int, default=20, metavar="S", help="seconds to measure (default: 20)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and results")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; exit status 1 if a stream was not whole."""
    _allow_files(arguments.streams + SPARE_FILES)
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        seen = _measure(arguments, Path(folder))
    print(_table(seen))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"benchmark": "connections", "machine": machine, **seen}, indent=1)
        )
    return 0 if seen["fates"] == {"whole": arguments.streams} else 1


def _measure(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    port, tokens = free_port(), 2 * arguments.ramp + arguments.watch + 10
    options = [
        "--port",
        str(port),
        "--data-dir",
        str(folder / "data"),
        "--max-live-streams",
        str(2 * arguments.streams),
    ]
    script = f"rate=1,tokens={tokens},seed=1"
    command = [sys.executable, "-m", "app", "serve", *options, "--engine", "scripted", "--scripted", script]
    server = ServerProcess("ours", command, port, folder / "log")
    server.start()
    try:
        server.wait_ready()
        body = chat_work("scripted", 1, mean_tokens=tokens, prompt_words=40, seed=1, spread=0.0).bodies[0]
        plan = StreamsPlan(
            "127.0.0.1",
            port,
            "/api/chat/completions",
            body,
            arguments.streams,
            tokens,
            1.0,
            arguments.ramp,
            arguments.watch,
        )
        return _watch(server, plan)
    finally:
        server.stop()


def _watch(server: ServerProcess, plan: StreamsPlan) -> dict[str, Any]:
    idle_bytes = server.rss_bytes()
    with subprocess.Popen(
        [sys.executable, "-m", "scripts.benchmarks.open_streams"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as load:
        say, hear = dialogue(load)
        say(json.dumps(asdict(plan)))
        hear("open")
        cpu_before, busy_before_s = server.cpu(), machine_busy_s()
        hear("watched")
        used, busy_s = server.cpu() - cpu_before, machine_busy_s() - busy_before_s
        open_bytes = server.rss_bytes()
        report: dict[str, Any] = json.loads(hear())
    span_s = plan.watch_s + 2 * plan.period_s
    return {
        **report,
        "bytes_per_stream": (open_bytes - idle_bytes) / plan.streams,
        "server_cpus": used.serving_s / span_s,
        "machine_cpus": busy_s / span_s,
    }


def _allow_files(wanted: int) -> None:
    """Raise the limit on open files, which the server inherits. Raises RuntimeError where it may not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < wanted:
        raise RuntimeError(f"{wanted} open files are needed, the limit is {hard} (ulimit -Hn)")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2 * wanted)), hard))


def _table(seen: dict[str, Any]) -> str:
    lines = [
        *((f"streams {fate}", f"{count} of {seen['streams']}", "") for fate, count in seen["fates"].items()),
        ("delay p50, ms", f"{seen['delay_p50_ms']:.1f}", ""),
        ("delay p99, ms", f"{seen['delay_p99_ms']:.1f}", f"< {MAX_DELAY_P99_MS}"),
        ("delay max, ms", f"{seen['delay_max_ms']:.1f}", ""),
        ("same p99, client lag included, ms", f"{seen['delay_with_client_lag_p99_ms']:.1f}", ""),
        (
            "memory per stream, KB",
            f"{seen['bytes_per_stream'] / 1024:.1f}",
            f"< {MAX_BYTES_PER_STREAM // 1024}",
        ),
        ("events watched", f"{seen['events_watched']}", ""),
        ("server busy, CPUs", f"{seen['server_cpus']:.2f}", ""),
        ("whole machine busy, CPUs", f"{seen['machine_cpus']:.2f}", ""),
    ]
    rows = [f"| {label} | {value} | {must} |" for label, value, must in lines]
    return "\n".join(["| figure | ours | must |", "| --- | --- | --- |", *rows])
