"""Our server under a load of many keys: started with keys of its own, restarted, its metrics read."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvloop

from scripts.benchmarks import findings
from scripts.benchmarks.findings import Finding
from scripts.benchmarks.machine import describe_machine
from scripts.benchmarks.processes import CpuUse, ServerProcess, free_port, machine_busy_s

POOL_TOKENS = 16_384
RETRACTIONS = "tokenring_engine_retractions_total"
SCRIPT = (
    "tokens=30,seed=1,pool={pool},prefill_s=0.004,prefill_rate=14000,step_s=0.0063,step_per_request_s=0.00036"
    ",step_per_held_token_s=0.000000965,wake_s=0.0036,spread=0.17"
)
"""Real SGLang with the built-in model on two cores, fitted (docs/log/2026-11.md): passes and way there."""


def add_node_arguments(parser: argparse.ArgumentParser, *, pool: int = POOL_TOKENS) -> None:
    """The options of whatever loads a node."""
    parser.add_argument("--engine", choices=("sglang", "scripted"), default="sglang")
    parser.add_argument(
        "--pool",
        type=int,
        default=pool,
        metavar="TOKENS",
        help=f"KV memory of the engine; 0 leaves SGLang's own (default: {pool})",
    )
    parser.add_argument(
        "--safety", choices=("on", "off"), default="off", help="safety screens, which only record"
    )
    parser.add_argument("--script", default=SCRIPT, help="speed of the scripted engine")
    parser.add_argument(
        "--setting",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="another setting of the server, such as ttft_target_s=1",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write machine, options and results")


def measure_node(
    arguments: argparse.Namespace,
    measure: Callable[[Node], Coroutine[Any, Any, list[Finding]]],
    keys: int,
    **terms: object,
) -> int:
    """Start a node with so many keys of those terms, measure it, print the table, write what was asked for.

    Returns the exit status: 1 where something was missed.
    """
    machine = describe_machine()
    with tempfile.TemporaryDirectory() as folder:
        node = Node(arguments, Path(folder))
        try:
            node.start()
            node.add_keys(keys, **terms)
            results = uvloop.run(measure(node))
        finally:
            node.server.stop()
    print(findings.markdown(results))
    if arguments.json:
        settings = {"benchmark": arguments.benchmark, "machine": machine, "options": vars(arguments)}
        findings.write(arguments.json, settings, results)
    return int(findings.missed(results))


class Node:
    """One server and the keys it knows; it can be stopped and started on the same data."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.keys: list[str] = []
        self.model = ""
        self._data = folder / "data"
        port = free_port()
        self.server = ServerProcess("ours", self._command(arguments, folder, port), port, folder / "log")
        self._admin = self._make_key("admin", "admin")

    @property
    def port(self) -> int:
        """Where it listens."""
        return self.server.port

    def start(self) -> None:
        """Start, and return once it takes requests."""
        self.server.start()
        self.server.wait_ready()
        self.model = self._model()

    def add_keys(self, count: int, **terms: object) -> None:
        """Make keys of the standard tier, without limits but those in `terms`, beside those there are."""
        for number in range(count):
            body = json.dumps({"name": f"load {number}", **terms}).encode()
            self.keys.append(json.load(self._call("/api/admin/keys", body))["key"])

    def metrics(self) -> dict[str, float]:
        """Every sample of `/metrics` by its name, those of a name added up; {} where nobody answers."""
        samples: dict[str, float] = {}
        with self._call("/metrics") as answer:
            for line in answer.read().decode().splitlines():
                if line and not line.startswith("#"):
                    name, _, value = line.rpartition(" ")
                    name = name.partition("{")[0]
                    samples[name] = samples.get(name, 0.0) + float(value)
        return samples

    async def idle(self) -> None:
        """Wait until the engine runs nothing: what clients left goes on for its grace period."""
        while True:
            metrics = await asyncio.to_thread(self.metrics)
            if not metrics["tokenring_live_streams"]:
                return
            await asyncio.sleep(0.5)

    def _model(self) -> str:
        return str(json.load(self._call("/v1/models"))["data"][0]["id"])

    def _call(self, path: str, body: bytes | None = None) -> Any:
        headers = {"Authorization": f"Bearer {self._admin}", "Content-Type": "application/json"}
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", body, headers)
        return urllib.request.urlopen(request, timeout=30)

    def _make_key(self, name: str, scope: str) -> str:
        command = [sys.executable, "-m", "app", "keys", "create", "--data-dir", str(self._data)]
        made = subprocess.run(
            [*command, "--name", name, "--scope", scope], check=True, capture_output=True, text=True
        )
        return made.stdout.strip()

    def _command(self, arguments: argparse.Namespace, folder: Path, port: int) -> list[str]:
        options = ["--port", str(port), "--data-dir", str(self._data), "--log-level", "warning"]
        options += ["--engine", arguments.engine, "--safety", arguments.safety]
        options += ["--config", str(_config(arguments, folder))]
        if arguments.engine == "scripted":
            options += ["--scripted", arguments.script.format(pool=arguments.pool)]
        if arguments.safety == "on":
            # Words in no order, of which the screens would refuse one in some hundreds.
            policy = folder / "policy.toml"
            policy.write_text('action = "flag"\n')
            options += ["--safety-policy", str(policy)]
        for setting in arguments.setting:
            name, _, value = setting.partition("=")
            options += [f"--{name.replace('_', '-')}", value]
        return [sys.executable, "-m", "app", "serve", *options]


@dataclass(frozen=True, slots=True)
class Reading:
    """A node's counters at one moment."""

    at_s: float
    metrics: dict[str, float]
    cpu: CpuUse
    machine_busy_s: float

    @classmethod
    def of(cls, node: Node) -> Reading:
        """Read now."""
        return cls(time.monotonic(), node.metrics(), node.server.cpu(), machine_busy_s())


@dataclass(frozen=True, slots=True)
class Used:
    """What happened between two readings."""

    first: Reading
    last: Reading

    def risen(self, name: str) -> float | None:
        """By how much a counter has risen; None where the server does not have it."""
        earlier, later = self.first.metrics, self.last.metrics
        return later[name] - earlier[name] if name in later and name in earlier else None

    def mean(self, histogram: str) -> float:
        """The mean of what a histogram was told; 0 of nothing."""
        total, count = self.risen(f"{histogram}_sum"), self.risen(f"{histogram}_count")
        return total / count if total and count else 0.0

    def cpus(self) -> str:
        """CPUs that server, engine and the whole machine were busy with."""
        span_s = self.last.at_s - self.first.at_s
        cpu, busy_s = self.last.cpu - self.first.cpu, self.last.machine_busy_s - self.first.machine_busy_s
        return ", ".join(f"{used_s / span_s:.2f}" for used_s in (cpu.serving_s, cpu.engine_s, busy_s))


def _config(arguments: argparse.Namespace, folder: Path) -> Path:
    path = folder / "tokenring.toml"
    lines = ["[engine.sglang]", f"max_total_tokens = {arguments.pool}"]
    path.write_text("\n".join(lines) + "\n" if arguments.engine == "sglang" and arguments.pool else "")
    return path
