"""The open streams of `bench path`: thousands on one process, one event per second each.

The scripted engine times each stream by itself. Streams start spread over the ramp, so their events are
spread over the second. Reported are delivery, the delay of events, and memory per stream.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from scripts.benchmarks.driver import dialogue
from scripts.benchmarks.findings import Finding, none_of, unjudged, within
from scripts.benchmarks.open_streams import StreamsPlan
from scripts.benchmarks.processes import ServerProcess, free_port, machine_busy_s
from scripts.benchmarks.prompts import chat_work

SPARE_FILES = 200
MAX_DELAY_P99_MS = 100
MAX_KB_PER_STREAM = 64
RAMP_S, WATCH_S = 30, 20
"""Seconds in which the streams are opened, and in which they are watched."""


def measure(streams: int, folder: Path) -> list[Finding]:
    """Open so many streams on a server of ours with its data in `folder`, and watch them.

    Raises RuntimeError where this process may not open as many files.
    """
    _allow_files(streams + SPARE_FILES)
    port, tokens = free_port(), 2 * RAMP_S + WATCH_S + 10
    options = ["--port", str(port), "--data-dir", str(folder / "data")]
    options += ["--max-live-streams", str(2 * streams)]
    script = f"rate=1,tokens={tokens},seed=1"
    command = [sys.executable, "-m", "app", "serve", *options, "--engine", "scripted", "--scripted", script]
    server = ServerProcess("ours", command, port, folder / "log")
    server.start()
    try:
        server.wait_ready()
        body = chat_work("scripted", 1, mean_tokens=tokens, prompt_words=40, seed=1, spread=0.0).bodies[0]
        path = "/api/chat/completions"
        plan = StreamsPlan("127.0.0.1", port, path, body, streams, tokens, 1.0, RAMP_S, WATCH_S)
        return _rows(_watch(server, plan))
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


def _rows(seen: dict[str, Any]) -> list[Finding]:
    streams, fates = seen["streams"], seen["fates"]
    about = f"{streams:,} open streams, an event a second each"
    others = ", ".join(f"{count} {fate}" for fate, count in fates.items() if fate != "whole")
    return [
        none_of(f"{about}: streams not whole{others and f' ({others})'}", streams - fates.get("whole", 0)),
        within(f"{about}: delay p99, ms", seen["delay_p99_ms"], MAX_DELAY_P99_MS),
        within(f"{about}: memory of each, KB", seen["bytes_per_stream"] / 1024, MAX_KB_PER_STREAM),
        unjudged(f"{about}: delay p50, ms", seen["delay_p50_ms"], "{:.3g}"),
        unjudged(
            f"{about}: p99 with the client's own lag, ms", seen["delay_with_client_lag_p99_ms"], "{:.3g}"
        ),
        unjudged(f"{about}: CPUs that the server used", seen["server_cpus"], "{:.2f}"),
        unjudged(f"{about}: CPUs that the machine used", seen["machine_cpus"], "{:.2f}"),
    ]
