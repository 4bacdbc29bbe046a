"""`bench hostile`: what another key's stream and `/healthz` still get while one caller attacks the server.

The attacks are in `scripts/benchmarks/attacks.py`; each uses an ordinary key, some also none. Before each
attack, a stream of another key is read alone for some seconds; then it is read as long as the attack lasts.
The stream has to keep a part of the tokens per second that it had alone. `/healthz` always has to answer in
time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator
from typing import NamedTuple

from scripts.benchmarks import findings
from scripts.benchmarks.asking import Asker
from scripts.benchmarks.attacks import ATTACKS, KEYLESS
from scripts.benchmarks.findings import Finding
from scripts.benchmarks.node import Node, add_node_arguments, measure_node

KEPT = 0.25
"""Of the tokens per second that a stream has alone."""
ALIVE_S = 0.5
POLL_S = 0.1
ANSWER_TIMEOUT_S = 60.0
SETTLE_TIMEOUT_S = 120


class Window(NamedTuple):
    """What the other key's stream and `/healthz` had in a span of time."""

    tokens_per_s: float
    healthz_s: float
    """The slowest answer."""
    failed: int
    """Answers of the stream that did not come to their own end."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench hostile`."""
    parser.add_argument("--seconds", type=float, default=60, help="seconds of each attack (default: 60)")
    parser.add_argument("--alone", type=float, default=15, help="seconds before each attack (default: 15)")
    parser.add_argument("--only", default="", metavar="NAMES", help="attacks to run, comma-separated")
    parser.add_argument("--streams", type=int, default=1, help="streams of the other key (default: 1)")
    add_node_arguments(parser, pool=0)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table; exit status 1 where something was missed."""
    return measure_node(arguments, lambda node: _Siege(arguments, node).run(), keys=2)


class _Siege:
    def __init__(self, arguments: argparse.Namespace, node: Node) -> None:
        self._arguments = arguments
        self._node = node
        self._tokens = self._failed = 0
        self._slowest_s = 0.0

    async def run(self) -> list[Finding]:
        names = [name for name in self._arguments.only.split(",") if name] or list(ATTACKS)
        rows = []
        rss_before = self._node.server.rss_bytes()
        async with self._reading():
            for name in names:
                rows += await self._attacked(name, self._node.keys[1])
                if name in KEYLESS:
                    rows += await self._attacked(name, "")
        rss_mib = (self._node.server.rss_bytes() - rss_before) / 2**20
        return [*rows, findings.unjudged("memory more than before, MiB", f"{rss_mib:.0f}")]

    async def _attacked(self, name: str, key: str) -> list[Finding]:
        arguments, label = self._arguments, name if key else f"{name}, no key"
        alone = await self._window(arguments.alone)
        attacker = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "scripts.benchmarks.attacks", name, "--port", str(self._node.port)),
            *("--seconds", str(arguments.seconds), "--key", key, "--model", self._node.model),
            stdout=asyncio.subprocess.PIPE,
        )
        assert attacker.stdout is not None
        await attacker.stdout.readline()
        beside = await self._window(arguments.seconds)
        output, _ = await attacker.communicate()
        answers: dict[str, int] = json.loads(output)
        await self._settled()
        findings.tell(f"{label}: alone {alone}, beside {beside}, answers {answers}")
        ratio = beside.tokens_per_s / alone.tokens_per_s if alone.tokens_per_s else 0.0
        broken = Counter({status: n for status, n in answers.items() if status.startswith("5")})
        del broken["503"]
        return [
            findings.at_least(f"{label}: tokens/s of another key, beside/alone", ratio, KEPT),
            findings.within(f"{label}: slowest /healthz, ms", 1000 * beside.healthz_s, 1000 * ALIVE_S),
            findings.none_of(f"{label}: other key's answers that broke", beside.failed),
            findings.none_of(f"{label}: 5xx but 503", broken.total()),
            findings.unjudged(f"{label}: answers", " ".join(f"{k}:{v}" for k, v in answers.items())),
        ]

    async def _settled(self) -> None:
        """Wait until the attack's generations are over: unread ones go on for their grace period."""
        for _ in range(SETTLE_TIMEOUT_S):
            if await self._live_streams() <= self._arguments.streams:
                return
            await asyncio.sleep(1)

    async def _live_streams(self) -> float:
        return (await asyncio.to_thread(self._node.metrics))["tokenring_live_streams"]

    async def _window(self, seconds: float) -> Window:
        self._tokens = self._failed = 0
        self._slowest_s = 0.0
        began_s = time.monotonic()
        await asyncio.sleep(seconds)
        return Window(self._tokens / (time.monotonic() - began_s), self._slowest_s, self._failed)

    @contextlib.asynccontextmanager
    async def _reading(self) -> AsyncIterator[None]:
        """Have the other key's streams read, and `/healthz` asked, meanwhile."""
        asker = Asker(self._node.port, self._node.keys, self._count)
        tasks = [asyncio.create_task(self._stream(asker, i)) for i in range(self._arguments.streams)]
        tasks.append(asyncio.create_task(self._poll()))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            asker.close()

    def _count(self, _key: int, frames: int) -> None:
        self._tokens += frames

    async def _stream(self, asker: Asker, number: int) -> None:
        turn = 0
        while True:
            turn += 1
            content = f"Tell me a long story. {number} {turn}"
            body = {
                "model": self._node.model,
                "messages": [{"role": "user", "content": content}],
                "max_tokens": 600,
                "ignore_eos": True,
                "stream": True,
                "store": False,
            }
            asked = await asker.ask(0, json.dumps(body).encode())
            if not asked.whole:
                self._failed += 1
                findings.tell(f"another key's answer broke: {asked.status} {asked.code}")
                await asyncio.sleep(POLL_S)

    async def _poll(self) -> None:
        while True:
            began_s = time.monotonic()
            try:
                async with asyncio.timeout(ANSWER_TIMEOUT_S):
                    await self._alive()
            except (OSError, TimeoutError):
                self._slowest_s = float("inf")
            self._slowest_s = max(self._slowest_s, time.monotonic() - began_s)
            await asyncio.sleep(POLL_S)

    async def _alive(self) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._node.port)
        try:
            writer.write(b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n")
            status = await reader.readline()
            if b" 200 " not in status:
                raise OSError
        finally:
            writer.transport.abort()
