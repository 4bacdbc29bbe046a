"""Kills or stops a process of the engine under live greedy streams, again and again, in one server.

Each stream must end as it does undisturbed, with strictly increasing ids and one true row in the ledger.
Exits with 1 when anything did not hold. docs/reliability.md says what is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import sqlite3
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil

from app.store.database import FILE_NAME
from scripts.benchmarks.bare import peer_command
from scripts.crash.engine_clients import Client, Heard
from scripts.crash.engine_kinds import FORM, MODEL, TOOL
from scripts.crash.findings import Findings
from scripts.crash.http import Gone, get_json
from scripts.crash.machine import ENGINE_PROCESSES, held, process_of
from scripts.crash.server import ROOT, Server

HANG_S = 5.0
SIGNALS = {"KILL": [signal.SIGKILL], "STOP": [signal.SIGSTOP], "MIX": [signal.SIGKILL, signal.SIGSTOP]}
BARE_PORT = 31_999
POLL_S = 0.01
START_TIMEOUT_S = 300.0
KINDS: Sequence[Mapping[str, Any]] = (
    {"ignore_eos": True},
    {"ignore_eos": True, "n": 2},
    {"response_format": FORM},
    {"tools": [TOOL], "tool_choice": "required"},
    {"ignore_eos": True, "frequency_penalty": 0.5},
)


class KillTest:
    """One server, its undisturbed answers, and rounds of losses."""

    def __init__(self, arguments: argparse.Namespace, directory: Path, seed: int) -> None:
        self._arguments = arguments
        self._directory = directory
        self._rng = random.Random(seed)  # noqa: S311  # no secret
        self.findings = Findings()
        self._bodies = [self._body(number) for number in range(arguments.streams)]
        self._undisturbed: list[Heard] = []
        self._heard: list[Heard] = []
        self._pauses_s: list[float] = []
        self._outages_s: list[float] = []
        self._diverged = 0
        self.result: dict[str, Any] = {}

    async def run(self) -> None:
        """Run everything; the result is in `result`."""
        bare_s = await asyncio.to_thread(_bare_start_s)
        config = self._directory / "tokenring.toml"
        config.write_text(f'[engine.sglang]\ndtype = "{self._arguments.dtype}"\n')
        began_s = time.monotonic()
        server = await Server.start(self._directory / "data", self._flags(config))
        try:
            await server.ready()
            start_s = time.monotonic() - began_s
            for _ in range(2):  # what the first run makes for good is no leak
                self._undisturbed = await self._all(server.port)
                self._heard += self._undisturbed
            held_first = held(server.pid)
            for number in range(1, self._arguments.rounds + 1):
                self.findings.kill = number
                await self._round(server, number)
            held_last = held(server.pid)
            self._check_ledger()
            server.terminate()
            self.findings.check(await server.stopped() == 0, "the server ends with status 0")
        finally:
            await server.kill()
        for what in ("descriptors", "threads"):
            self.findings.check(
                held_last[what] <= held_first[what] + 5,
                f"{what} are within 5",
                first=held_first,
                last=held_last,
            )
        self.findings.check(held_last["zombies"] == 0, "no zombies are left", last=held_last)
        self.result = {
            "rounds": self._arguments.rounds,
            "streams": len(self._bodies),
            "signal": self._arguments.signal,
            "dtype": self._arguments.dtype,
            "checks": self.findings.num_checks,
            "violations": len(self.findings.violations),
            "diverged_choices": self._diverged,
            "pause_p50_s": _percentile(self._pauses_s, 50),
            "pause_p99_s": _percentile(self._pauses_s, 99),
            "outage_p50_s": _percentile(self._outages_s, 50),
            "outage_max_s": round(max(self._outages_s, default=0.0), 2),
            "server_start_s": round(start_s, 2),
            "bare_engine_start_s": round(bare_s, 2),
            "held_first": held_first,
            "held_last": held_last,
        }

    def _flags(self, config: Path) -> list[str]:
        rounds = str(self._arguments.rounds + 1)
        flags = ["--config", str(config), "--engine-restarts", rounds, "--safety", self._arguments.safety]
        return [*flags, "--engine-hang-s", str(HANG_S), "--heartbeat-s", "1"]

    def _body(self, number: int) -> dict[str, Any]:
        kind = KINDS[number % len(KINDS)] if self._arguments.mix else KINDS[0]
        return {
            "model": MODEL,
            "messages": [{"role": "user", "content": f"Tell me about ring number {number}."}],
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": self._arguments.tokens,
            **kind,
        }

    def _clients(self, port: int) -> list[Client]:
        return [Client(port, body["messages"][0]["content"], body) for body in self._bodies]

    async def _all(self, port: int) -> list[Heard]:
        return list(await asyncio.gather(*(client.run() for client in self._clients(port))))

    async def _round(self, server: Server, number: int) -> None:
        """Lose a process when a random share of the answers has come; check what the clients heard."""
        clients = self._clients(server.port)
        running = [asyncio.create_task(client.run()) for client in clients]
        share = self._rng.uniform(0.05, 0.6)
        goal = share * sum(heard.characters for heard in self._undisturbed)
        while sum(client.heard.characters for client in clients) < goal:  # noqa: ASYNC110  # it is per token
            await asyncio.sleep(POLL_S)
        name = self._rng.choice(ENGINE_PROCESSES)
        signum = self._rng.choice(SIGNALS[self._arguments.signal])
        lost_s = time.monotonic()
        pid = process_of(server.pid, name)
        assert pid is not None
        os.kill(pid, signum)
        await self._watch_outage(server, lost_s, clients)
        heard = list(await asyncio.gather(*running))
        self._heard += heard
        for stream, expected in zip(heard, self._undisturbed, strict=True):
            self._check(stream, expected)
        took_s = time.monotonic() - lost_s
        longest_s = max(stream.longest_pause_s for stream in heard)
        print(
            f"round {number}: {signum.name} {name} at {share:.0%}: pause {longest_s:.1f} s; all ended "
            f"after {took_s:.1f} s, {len(self.findings.violations)} violations so far",
            file=sys.stderr,
            flush=True,
        )

    async def _watch_outage(self, server: Server, lost_s: float, clients: list[Client]) -> None:
        """See the server not ready and ready again; some clients drop meanwhile and come back."""
        is_away = False
        dropping = [client for client in clients if self._rng.random() < self._arguments.drops]
        while time.monotonic() < lost_s + START_TIMEOUT_S:
            status, _ = await get_json(server.port, "/readyz")
            if status != 200 and not is_away:
                is_away = True
                alive, _ = await get_json(server.port, "/healthz")
                self.findings.check(alive == 200, "the server is alive while the engine is away")
                for client in dropping:
                    client.drop()
            elif status == 200 and is_away:
                self._outages_s.append(time.monotonic() - lost_s)
                return
            await asyncio.sleep(POLL_S)
        self.findings.check(False, "the engine comes back", is_away=is_away)

    def _check(self, heard: Heard, expected: Heard) -> None:
        check, prompt = self.findings.check, heard.prompt
        self._pauses_s.append(heard.longest_pause_s)
        check(heard.done and heard.error is None, "a stream ends well", prompt=prompt, error=heard.error)
        increasing = all(a < b for a, b in zip(heard.ids, heard.ids[1:], strict=False))
        check(increasing, "ids strictly increase", prompt=prompt)
        if self._arguments.dtype != "float32":
            # The arithmetic of a prefill is another: from some point on it is another valid answer.
            self._diverged += sum(heard.text.get(t) != text for t, text in expected.text.items())
            check(heard.finish.keys() == expected.finish.keys(), "every choice ends", prompt=prompt)
            return
        check(heard.finish == expected.finish, "the end is the undisturbed one", prompt=prompt)
        check(heard.text == expected.text, "the text is the undisturbed one", prompt=prompt)
        tokens = heard.usage.get("completion_tokens"), expected.usage.get("completion_tokens")
        check(tokens[0] == tokens[1], "the count is the undisturbed one", prompt=prompt, tokens=tokens)

    def _check_ledger(self) -> None:
        """Each request has one row, settled, with the counts that its client was told."""
        query = "SELECT id, state, prompt_tokens, completion_tokens - withheld_tokens FROM requests"
        with closing(sqlite3.connect(self._directory / "data" / FILE_NAME)) as connection:
            rows = connection.execute(query).fetchall()
        by_id = {row[0]: row[1:] for row in rows}
        self.findings.check(len(by_id) == len(rows) == len(self._heard), "one row for each request")
        for heard in self._heard:
            expected = (
                "settled",
                heard.usage.get("prompt_tokens"),
                heard.usage.get("completion_tokens"),
            )
            row = by_id.get(heard.request_id)
            self.findings.check(
                row == expected, "the ledger says what the client was told", row=row, expected=expected
            )


def _percentile(values: list[float], percent: int) -> float:
    """Of a few hundred values; the largest stands for what is beyond them."""
    if len(values) < 2:
        return round(max(values, default=0.0), 2)
    return round(statistics.quantiles(values, n=100, method="inclusive")[percent - 1], 2)


def _bare_start_s() -> float:
    """Seconds from the start of SGLang's own server to its first `/health` that is well."""
    command = peer_command("", BARE_PORT)
    began_s = time.monotonic()
    process = psutil.Popen(command, cwd=ROOT, stdout=-3, stderr=-3)
    try:
        while time.monotonic() < began_s + START_TIMEOUT_S:
            if asyncio.run(_is_well(BARE_PORT)):
                return time.monotonic() - began_s
            time.sleep(POLL_S)
    finally:
        for child in [*process.children(recursive=True), process]:
            child.kill()
        process.wait()
    raise RuntimeError("SGLang's own server did not start")


async def _is_well(port: int) -> bool:
    try:
        status, _ = await get_json(port, "/model_info")
    except (*Gone, OSError, KeyError, ValueError):
        return False
    return status == 200


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
    parser.add_argument("--signal", choices=tuple(SIGNALS), default="KILL", help="what a process gets")
    parser.add_argument("--streams", type=int, default=16, help="streams at once (default 16)")
    parser.add_argument("--tokens", type=int, default=400, help="longest answer in tokens (default 400)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the model")
    parser.add_argument("--mix", action="store_true", help="also n=2, a schema, a tool and a penalty")
    parser.add_argument("--safety", choices=("on", "observe", "off"), default="on", help="the screens")
    parser.add_argument(
        "--drops", type=float, default=0.25, help="clients that drop in the outage (default 0.25)"
    )
    parser.add_argument("--seed", type=int, default=None, help="of the moments; the timing is never the same")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
