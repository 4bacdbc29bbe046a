"""`bench herd`: 2,000 requests within a second of a restart.

First the throughput of a full node is measured, with clients in a closed loop. Then SIGTERM, and a new
process on the same data. `--requests` clients come within one second of its being ready, or (`--at port`)
of its port's first answer. A part of them obeys `Retry-After`. Throughput is tokens as they arrive, over
`WINDOW_S`. It is back with the first window that has 90% of the full node's.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import socket
import time
from collections.abc import Sequence

from scripts.benchmarks import findings
from scripts.benchmarks.asking import Asker, Attempt
from scripts.benchmarks.chats import Chats, Shape
from scripts.benchmarks.crowd import ClientRequest, Crowd, attempts
from scripts.benchmarks.findings import Finding, retractions, statuses
from scripts.benchmarks.node import RETRACTIONS, Node, add_node_arguments, measure_node
from scripts.benchmarks.stats import percentile

WINDOW_S = 3.0
STEP_S = 0.5
BACK = 0.9
BACK_WITHIN_S = 30.0
IN_TIME = 0.99


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench herd`."""
    parser.add_argument("--requests", type=int, default=2000, help="requests at once (default: 2000)")
    parser.add_argument("--keys", type=int, default=20, help="keys that the clients share (default: 20)")
    parser.add_argument(
        "--obeying", type=float, default=0.5, help="share that obeys Retry-After (default: 0.5)"
    )
    parser.add_argument("--at", choices=("ready", "port"), default="ready", help="what the requests wait for")
    parser.add_argument(
        "--within", type=float, default=1.0, metavar="S", help="seconds they spread over (default: 1)"
    )
    parser.add_argument("--clients", type=int, default=40, help="clients that fill a node (default: 40)")
    parser.add_argument(
        "--steady", type=int, default=40, metavar="S", help="seconds to measure the full node (default: 40)"
    )
    parser.add_argument(
        "--watch", type=int, default=60, metavar="S", help="seconds to measure after (default: 60)"
    )
    parser.add_argument("--ttft", type=float, default=2.0, metavar="S", help="TTFT target (default: 2)")
    parser.add_argument("--seed", type=int, default=1)
    add_node_arguments(parser)


class Herd:
    """One restart of one node."""

    def __init__(self, arguments: argparse.Namespace, node: Node) -> None:
        self._arguments = arguments
        self._node = node
        self._asker = Asker(node.port, node.keys, self._count)
        self._chats = Chats(node.model, Shape(), arguments.seed)
        self._rng = random.Random(arguments.seed)  # noqa: S311  # reproducible, not secret
        self._frames = 0

    async def run(self) -> list[Finding]:
        """A full node, its restart, the herd."""
        arguments = self._arguments
        try:
            steady = await self._full()
            findings.tell(f"a full node: {steady:.0f} tokens/s")
            down_s, answered_s = await asyncio.to_thread(self._restart)
            series, requests, ready_s = await self._come()
            end = self._node.metrics()
        finally:
            self._asker.close()
        back_s = next((at for at, rate in series if rate >= BACK * steady), float("inf"))
        ended = [rate for at, rate in series if at > BACK_WITHIN_S]
        return [
            findings.unjudged(
                "stop; port answers after start; ready after that, s",
                f"{down_s:.1f}; {answered_s:.1f}; {ready_s:.1f}",
            ),
            *statuses(attempts(requests)),
            retractions(end.get(RETRACTIONS)),
            *_first_tokens(requests, arguments.ttft),
            findings.unjudged("tokens/s of a full node", f"{steady:.0f}"),
            findings.within(f"seconds until {BACK:.0%} of it", back_s, BACK_WITHIN_S),
            findings.unjudged("tokens/s after that, mean", f"{sum(ended) / max(len(ended), 1):.0f}"),
        ]

    async def _full(self) -> float:
        """Frames a second of a node with more clients than it needs."""
        crowd = self._crowd()
        for number in range(self._arguments.clients):
            crowd.spawn(crowd.in_turn(number % self._asker.num_keys))
        await asyncio.sleep(2 * WINDOW_S)
        frames_before = self._frames
        await asyncio.sleep(self._arguments.steady)
        frames, seconds = self._frames - frames_before, float(self._arguments.steady)
        await crowd.leave()
        return frames / seconds

    def _restart(self) -> tuple[float, float]:
        """Stop and start; how long each took, until the port (or the engine) answers."""
        began_s = time.monotonic()
        self._node.server.stop()
        stopped_s = time.monotonic()
        self._node.server.start()
        if self._arguments.at == "ready":
            self._node.server.wait_ready()
        else:
            _wait_for_port(self._node.port)
        return stopped_s - began_s, time.monotonic() - stopped_s

    async def _come(self) -> tuple[list[tuple[float, float]], list[ClientRequest], float]:
        """Tokens a second by time since the engine was ready, what the herd met, and when it was ready."""
        arguments, crowd = self._arguments, self._crowd()
        came_at_s = time.monotonic()
        crowd.spawn(crowd.come(arguments.requests / arguments.within, arguments.within, arguments.obeying))
        await asyncio.to_thread(self._node.server.wait_ready)
        ready_at_s = time.monotonic()
        marks = [(0.0, self._frames)]
        while (at_s := time.monotonic() - ready_at_s) < arguments.watch:
            await asyncio.sleep(STEP_S)
            marks.append((at_s + STEP_S, self._frames))
        await crowd.leave()
        return _rates(marks), crowd.requests, ready_at_s - came_at_s

    def _crowd(self) -> Crowd:
        return Crowd(self._asker, self._chats.next, self._rng)

    def _count(self, _key: int, frames: int) -> None:
        self._frames += frames


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table; exit status 1 where something was missed."""
    return measure_node(arguments, lambda node: Herd(arguments, node).run(), keys=arguments.keys)


def _rates(marks: Sequence[tuple[float, int]]) -> list[tuple[float, float]]:
    """Frames a second over each window, by its end."""
    back = round(WINDOW_S / STEP_S)
    return [
        (later[0], (later[1] - earlier[1]) / (later[0] - earlier[0]))
        for earlier, later in zip(marks, marks[back:], strict=False)
    ]


def _first_tokens(requests: Sequence[ClientRequest], target_s: float) -> list[Finding]:
    let_in: list[Attempt] = [request for request in attempts(requests) if request.first_at_s is not None]
    ttfts = [request.ttft_s for request in let_in]
    late = sum(ttft_s > target_s for ttft_s in ttfts)
    return [
        findings.unjudged(
            "let in; of them at once",
            f"{len(let_in)}; {sum(w.attempts[:1] != [] and w.attempts[0].status == 200 for w in requests)}",
        ),
        findings.unjudged(
            "TTFT p50, p99, most, s",
            f"{percentile(ttfts, 50):.2f}, {percentile(ttfts, 99):.2f}, {max(ttfts, default=0):.2f}",
        ),
        findings.within("part of them whose first token came late", late / max(len(let_in), 1), 1 - IN_TIME),
    ]


def _wait_for_port(port: int) -> None:
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.02)
        else:
            return
