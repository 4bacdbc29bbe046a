"""Kills or stops a process of the engine, or the server, under live greedy streams, again and again.

Each stream must end as it does undisturbed, with strictly increasing ids and one true row in the ledger.
Exits with 1 when anything did not hold. docs/inside/fault-tests.md says what is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import psutil

from app.store.database import FILE_NAME
from scripts.benchmarks import engine_args
from scripts.benchmarks.bare import peer_command
from scripts.crash.engine_clients import Client, Reply
from scripts.crash.findings import Findings
from scripts.crash.http import get_text
from scripts.crash.kill_checks import StreamChecks, check_ledger
from scripts.crash.kill_losses import (
    DRAIN_S,
    ENGINE_SIGNALS,
    POLL_S,
    SERVER_SIGNALS,
    START_TIMEOUT_S,
    EngineLoss,
    ServerLoss,
    free_port,
    is_serving,
)
from scripts.crash.kill_phases import (
    PHASES,
    SCENES,
    Phase,
    is_in,
    num_queued,
    phases_of,
    reached_in,
    scenes_of,
)
from scripts.crash.kill_requests import Scene, bodies, kind_of, server_flags
from scripts.crash.machine import held
from scripts.crash.server import ROOT, Server

BARE_PORT = 31_999
HANG_S, LONG_HANG_S = 5.0, 20.0
"""`engine_hang_s` of the server, and where it reads long prompts on few cores."""


class KillTest:
    """One data directory, the undisturbed answers, and rounds of losses."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, seed: int) -> None:
        self._arguments = arguments
        self._directory = directory
        self._rng = random.Random(seed)  # noqa: S311  # no secret
        self.findings = Findings()
        self._checks = StreamChecks(self.findings, exact=arguments.dtype == "float32")
        self._phases = phases_of(arguments.phase)
        self._remaining: list[Phase] = []
        self._of_server = arguments.target == "server"
        self._undisturbed: dict[Scene, list[Reply]] = {}
        self._reply: list[Reply] = []
        self._pauses_s: list[float] = []
        self._outages_s: list[float] = []
        self._in_phase = Counter[str]()
        self._cut_off = 0
        self._queued: list[int] = []
        self._memory_mb: list[int] = []
        """Memory of the server after each round."""
        self._port = free_port()
        self.result: dict[str, Any] = {}

    async def run(self) -> None:
        """Run everything; the result is in `result`."""
        bare_s = await asyncio.to_thread(_bare_start_s, self._arguments) if self._arguments.bare else 0.0
        flags = self._flags()
        began_s = time.monotonic()
        server = await Server.start(self._directory / "data", flags)
        loss = self._loss(server, flags)
        try:
            await server.ready()
            start_s = time.monotonic() - began_s
            for scene in scenes_of(self._phases):
                await self._receive_undisturbed(scene)
            held_first = held(server.pid)
            for number in range(1, self._arguments.rounds + 1):
                self.findings.kill = number
                await self._round(loss, number)
            held_last = held(loss.server.pid)
            database = self._directory / "data" / FILE_NAME
            check_ledger(database, self._reply, self.findings, killed=self._of_server)
            loss.server.terminate()
            self.findings.check(await loss.server.stopped() == 0, "the server ends with status 0")
        finally:
            await loss.server.kill()
        if not self._of_server:
            self._check_held(held_first, held_last)
        times = {"server_start_s": round(start_s, 2), "bare_engine_start_s": round(bare_s, 2)}
        self.result = self._results() | times | {"held_first": held_first, "held_last": held_last}

    def _flags(self) -> list[str]:
        arguments = self._arguments
        flags = server_flags(self._directory, vars(arguments), scenes_of(self._phases))
        rounds = str(arguments.rounds + 1)
        flags += ["--engine-restarts", rounds, "--engine-hang-s", str(arguments.hang_s)]
        return [*flags, "--port", str(self._port), "--drain-timeout-s", str(DRAIN_S)]

    def _loss(self, server: Server, flags: list[str]) -> EngineLoss | ServerLoss:
        signals = self._arguments.signal
        if self._of_server:
            return ServerLoss(server, (self._directory / "data", flags), signals, self._rng, self.findings)
        return EngineLoss(server, signals, self._arguments.drops, self._rng, self.findings)

    async def _receive_undisturbed(self, scene: Scene) -> None:
        """Twice at first, because what the first run makes for good is no leak."""
        times = 1 if self._undisturbed else 2
        runs = [list(await asyncio.gather(*(c.run() for c in self._clients(scene)))) for _ in range(times)]
        for streams in runs:
            self._checks.undisturbed(streams, runs[0])
        for number, reply in enumerate(runs[-1]):
            kind = kind_of(number, scene, mix=self._arguments.mix)
            self._checks.kind(kind, reply, screened=self._arguments.safety == "on")
        self._undisturbed[scene] = runs[-1]
        self._reply += itertools.chain(*runs)

    def _clients(self, scene: Scene) -> list[Client]:
        asked = bodies(scene, self._arguments.streams, self._arguments.tokens, mix=self._arguments.mix)
        keys = [f"{self._rng.getrandbits(64):x}" if self._of_server else "" for _ in asked]
        return [Client(self._port, body, key) for body, key in zip(asked, keys, strict=True)]

    async def _round(self, loss: EngineLoss | ServerLoss, number: int) -> None:
        """Lose something when a live request is in the phase; check what the clients received."""
        phase = self._next_phase()
        undisturbed = self._undisturbed[SCENES[phase]]
        clients = self._clients(SCENES[phase])
        is_reached = reached_in(phase, undisturbed, self._rng)
        running = [asyncio.create_task(client.run()) for client in clients]
        while not is_reached(clients) and not all(task.done() for task in running):  # noqa: ASYNC110  # per token
            await asyncio.sleep(POLL_S)
        if phase == "queued":
            self._queued.append(num_queued(await get_text(self._port, "/metrics")))
        self._in_phase[phase] += is_in(phase, clients, undisturbed)
        at_loss = [dict(client.reply.text) for client in clients]
        lost_s = time.monotonic()
        lost = await loss.lose(clients)
        self._outages_s.append(time.monotonic() - lost_s)
        reply = list(await asyncio.gather(*running))
        self._reply += reply
        is_cut = isinstance(loss, ServerLoss) and loss.was_killed
        for client, expected, had in zip(clients, undisturbed, at_loss, strict=True):
            replayed = await client.replay()
            check = self._checks.cut_off if is_cut else self._checks.stream
            check(client.reply, expected, had, replayed)
        self._cut_off += sum(stream.error is not None for stream in reply)
        self._pauses_s += [stream.longest_pause_s for stream in reply]
        self._memory_mb.append(held(loss.server.pid)["rss_mb"])
        print(
            f"round {number}: {lost}, {phase}: pause {max(self._pauses_s[-len(reply) :]):.1f} s; all ended "
            f"after {time.monotonic() - lost_s:.1f} s; "
            f"{self.findings.num_checks} checks, {len(self.findings.violations)} violations so far; "
            f"{self._memory_mb[-1]} MB",
            file=sys.stderr,
            flush=True,
        )

    def _next_phase(self) -> Phase:
        """Each phase once, in random order, and then again."""
        if not self._remaining:
            self._remaining = self._rng.sample(self._phases, len(self._phases))
        return self._remaining.pop()

    def _check_held(self, first: dict[str, int], last: dict[str, int]) -> None:
        for what in ("descriptors", "threads"):
            self.findings.check(last[what] <= first[what] + 5, f"{what} are within 5", first=first, last=last)
        self.findings.check(last["zombies"] == 0, "no zombies are left", last=last)

    def _results(self) -> dict[str, Any]:
        arguments = self._arguments
        return {
            **{name: getattr(arguments, name) for name in ("rounds", "streams", "target", "signal", "dtype")},
            "phase": arguments.phase,
            "rounds_in_phase": dict(self._in_phase),
            "queued_at_loss": self._queued,
            "checks": self.findings.num_checks,
            "violations": len(self.findings.violations),
            "cut_off": self._cut_off,
            **self._checks.result(),
            "pause_p50_s": _percentile(self._pauses_s, 50),
            "pause_p99_s": _percentile(self._pauses_s, 99),
            "outage_p50_s": _percentile(self._outages_s, 50),
            "outage_max_s": round(max(self._outages_s, default=0.0), 2),
            "memory_mb_after_rounds": self._memory_mb,
        }


def _percentile(values: list[float], percent: int) -> float:
    """Of a few hundred values; the largest stands for what is beyond them."""
    if len(values) < 2:
        return round(max(values, default=0.0), 2)
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 2)


def _bare_start_s(arguments: argparse.Namespace) -> float:
    """Seconds from the start of SGLang's own server to its first `/health` that is well."""
    command = peer_command("", BARE_PORT, server_args=engine_args.parse(arguments.engine_args))
    began_s = time.monotonic()
    process = psutil.Popen(command, cwd=ROOT, stdout=-3, stderr=-3)
    try:
        while time.monotonic() < began_s + START_TIMEOUT_S:
            if asyncio.run(is_serving(BARE_PORT)):
                return time.monotonic() - began_s
            time.sleep(POLL_S)
    finally:
        for child in [*process.children(recursive=True), process]:
            child.kill()
        process.wait()
    raise RuntimeError("SGLang's own server did not start")


def main() -> int:
    """Run the test; the exit status."""
    arguments = _arguments()
    directory = Path(tempfile.mkdtemp(prefix="tokenring-engine-kills-"))
    seed = random.SystemRandom().randrange(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}, data in {directory}", file=sys.stderr, flush=True)
    test = KillTest(arguments, directory, seed)
    asyncio.run(test.run())
    if arguments.json:
        print(json.dumps({"seed": seed, **test.result}))
    else:
        for name, value in test.result.items():
            print(f"{name.replace('_', ' '):24} {value}")
    if test.findings.violations:
        print(f"{len(test.findings.violations)} VIOLATIONS; the data is kept in {directory}", file=sys.stderr)
        return 1
    shutil.rmtree(directory)
    return 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="scripts/engine_kill_test", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20, help="losses (default 20)")
    parser.add_argument("--target", choices=("engine", "server"), default="engine", help="what is lost")
    parser.add_argument(
        "--signal", choices=("KILL", "STOP", "TERM", "MIX"), default="KILL", help="what it gets"
    )
    parser.add_argument("--phase", choices=(*PHASES, "any"), default="decode", help="when it is lost")
    parser.add_argument("--streams", type=int, default=16, help="streams at once (default 16)")
    parser.add_argument("--tokens", type=int, default=400, help="longest answer in tokens (default 400)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    parser.add_argument("--mix", action="store_true", help="requests of every kind")
    parser.add_argument(
        "--overlap", action="store_true", help="the engine overlaps steps and chunks prompts, as on a GPU"
    )
    parser.add_argument("--safety", choices=("on", "observe", "off"), default="on", help="the screens")
    parser.add_argument(
        "--drops", type=float, default=0.25, help="clients that drop in the outage (default 0.25)"
    )
    parser.add_argument(
        "--hang-s", type=float, default=None, help="`engine_hang_s`, by the phase if not given"
    )
    parser.add_argument(
        "--no-bare", dest="bare", action="store_false", help="SGLang's own server is not timed"
    )
    engine_args.add_argument(parser)
    parser.add_argument("--seed", type=int, default=None, help="of the moments; the timing is never the same")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    arguments = parser.parse_args()
    if arguments.signal not in (SERVER_SIGNALS if arguments.target == "server" else ENGINE_SIGNALS):
        parser.error(f"--signal {arguments.signal} is not for --target {arguments.target}")
    if arguments.safety == "off" and "held_back" in phases_of(arguments.phase):
        parser.error("nothing is held back with --safety off")
    if arguments.hang_s is None:  # a long prefill is silent, and no hang
        arguments.hang_s = LONG_HANG_S if "prefill" in phases_of(arguments.phase) else HANG_S
    return arguments


if __name__ == "__main__":
    sys.exit(main())
