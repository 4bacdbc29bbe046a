"""`bench start`: how long a start takes, against SGLang's own server, interleaved.

Ours is ready when `/readyz` says so, the peer when `/health` does; both have then generated once. The time
until our port answers is shown too.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

from scripts.benchmarks.bare import peer_command
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import ServerFailed, ServerProcess, free_port
from scripts.benchmarks.stats import paired_ratio, percentile

MAX_READY_RATIO = 1.25
MAX_PORT_S = 3.0
POLL_S = 0.02


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench start`."""
    parser.add_argument("--pairs", type=int, default=5, help="starts of each (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine and results")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; exit status 1 where a bound is missed."""
    ours_s, peer_s, port_s = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        for pair in range(-1, arguments.pairs):  # the first fills the page cache
            sides = ["ours", "peer"] if pair % 2 else ["peer", "ours"]
            took = {side: _start(side, Path(folder)) for side in sides}
            if pair < 0:
                continue
            ours_s.append(took["ours"][1])
            port_s.append(took["ours"][0])
            peer_s.append(took["peer"][1])
            print(
                f"pair {pair + 1}: ready after {ours_s[-1]:.1f} : {peer_s[-1]:.1f} s,"
                f" port after {port_s[-1]:.2f} s",
                file=sys.stderr,
            )
    ratio = paired_ratio(ours_s, peer_s)
    print("| figure | ours | bare | ours/bare [95%] | must |\n| --- | --- | --- | --- | --- |")
    print(
        f"| ready, s | {percentile(ours_s, 50):.1f} | {percentile(peer_s, 50):.1f}"
        f" | {ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}] | ≤ {MAX_READY_RATIO} |"
    )
    print(f"| port answers, s | {percentile(port_s, 50):.2f} | | | ≤ {MAX_PORT_S:.0f} |")
    if arguments.json:
        figures = {"ours_s": ours_s, "peer_s": peer_s, "port_s": port_s}
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"benchmark": "start", "machine": describe_machine(), **figures}, indent=1)
        )
    return 0 if ratio.value <= MAX_READY_RATIO and max(port_s) <= MAX_PORT_S else 1


def _start(side: str, folder: Path) -> tuple[float, float]:
    """Seconds until the port answers, and until it is ready, of one start."""
    port = free_port()
    if side == "ours":
        options = ["--port", str(port), "--data-dir", str(folder / "data")]
        command = [sys.executable, "-m", "app", "serve", *options]
    else:
        command = peer_command("", port)
    server = ServerProcess(side, command, port, folder / side)
    begun_s = time.monotonic()
    server.start()
    try:
        answering_s = _until_answering(port, begun_s) if side == "ours" else 0.0
        server.wait_ready()
        return answering_s, time.monotonic() - begun_s
    finally:
        server.stop()


def _until_answering(port: int, begun_s: float) -> float:
    while (passed_s := time.monotonic() - begun_s) < 60:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=1).close()
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
        else:
            return passed_s
    raise ServerFailed("the port did not answer within 60 s")
