"""`bench overload`: five times the load that the node can serve, for minutes.

First it looks for the throughput without overload: clients in a closed loop, more and more of them. The best
is the loop with most requests per second that have their first token within the target and end within their
deadline. Then new clients come at `--factor` times that rate, whether they are refused or not (open loop), of
many keys of equal weight. A part of them obeys `Retry-After` exactly; the others give up when refused. Last
the closed loop is measured once more, because the machine's speed varies.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.benchmarks import findings
from scripts.benchmarks.asking import Asker, Attempt
from scripts.benchmarks.chats import Chats, Shape
from scripts.benchmarks.crowd import ClientRequest, Crowd, attempts
from scripts.benchmarks.findings import Finding, retractions, statuses
from scripts.benchmarks.node import RETRACTIONS, Node, Reading, Used, add_node_arguments, measure_node
from scripts.benchmarks.stats import bootstrap_ratio, percentile, share

BIN_S = 5.0
GOODPUT = 0.9
FIRST_RETRY = 0.9


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench overload`."""
    parser.add_argument("--seconds", type=int, default=300, help="how long the overload lasts (default: 300)")
    parser.add_argument("--factor", type=float, default=5.0, help="offered load over throughput (default: 5)")
    parser.add_argument("--keys", type=int, default=20, help="keys that the clients share (default: 20)")
    parser.add_argument(
        "--obeying", type=float, default=0.5, help="share that obeys Retry-After (default: 0.5)"
    )
    parser.add_argument(
        "--clients",
        default="8,16,24,32,48,64",
        help="clients in the closed loops to try (default: 8,16,24,32,48,64)",
    )
    parser.add_argument(
        "--search", type=int, default=20, metavar="S", help="seconds for each closed loop (default: 20)"
    )
    parser.add_argument(
        "--alone", type=int, default=60, metavar="S", help="seconds for the best closed loop (default: 60)"
    )
    parser.add_argument("--ttft", type=float, default=2.0, metavar="S", help="TTFT target (default: 2)")
    parser.add_argument(
        "--deadline", type=float, default=60.0, metavar="S", help="seconds for a whole answer (default: 60)"
    )
    parser.add_argument("--seed", type=int, default=1)
    add_node_arguments(parser)


@dataclass(frozen=True, slots=True)
class Phase:
    """A stretch of load: what was sent in it, and how many good answers ended in each of its bins."""

    requests: Sequence[ClientRequest]
    started_at_s: float
    seconds: float
    good: list[Attempt]

    @property
    def per_s(self) -> float:
        """Good answers a second."""
        return len(self.good) / self.seconds

    def bins(self, weight: str = "") -> list[float]:
        """Good answers, or a sum over them, by when they ended."""
        totals = [0.0] * max(int(self.seconds / BIN_S), 1)
        for attempt in self.good:
            at = int(((attempt.ended_at_s or 0.0) - self.started_at_s) / BIN_S)
            if at < len(totals):
                totals[at] += getattr(attempt, weight) if weight else 1
        return totals


class Overload:
    """One run against one node."""

    def __init__(self, arguments: argparse.Namespace, node: Node) -> None:
        self._arguments = arguments
        self._asker = Asker(node.port, node.keys)
        self._chats = Chats(node.model, Shape(), arguments.seed)
        self._rng = random.Random(arguments.seed)  # noqa: S311  # reproducible, not secret
        self._node = node

    async def run(self) -> list[Finding]:
        """Search, measure alone, measure overloaded."""
        arguments = self._arguments
        try:
            clients = await self._most_clients()
            alone = [await self._closed(clients, arguments.alone)]
            rate = arguments.factor * alone[0].per_s
            findings.tell(f"alone {alone[0].per_s:.2f} good answers/s; now {rate:.1f} clients/s")
            over, used = await self._overloaded(rate)
            alone.append(await self._closed(clients, arguments.alone))
        finally:
            self._asker.close()
        return [
            *statuses(attempts(over.requests)),
            retractions(used.risen(RETRACTIONS)),
            *_throughput(alone, over, rate, arguments),
            *_retries(over.requests),
            findings.unjudged("waited for room, mean, s", f"{used.mean('tokenring_queue_seconds'):.2f}"),
            findings.unjudged("server, engine, whole machine busy, CPUs", used.cpus()),
        ]

    async def _most_clients(self) -> int:
        """In how large a closed loop most are served in time."""
        best, clients = None, 0
        for number in map(int, self._arguments.clients.split(",")):
            phase = await self._closed(number, self._arguments.search)
            findings.tell(
                f"{number} clients: {phase.per_s:.2f} good answers/s of {len(phase.requests)} requests"
            )
            if best is not None and phase.per_s < 0.8 * best.per_s:
                break
            if best is None or phase.per_s > best.per_s:
                best, clients = phase, number
        return clients

    async def _closed(self, clients: int, seconds: float) -> Phase:
        """So many clients, each with one request after the other; measured from when all have begun."""
        crowd = self._crowd()
        for number in range(clients):
            crowd.spawn(crowd.in_turn(number % self._asker.num_keys))
        await asyncio.sleep(min(BIN_S, seconds / 4))
        return await self._measured(crowd, seconds)

    async def _overloaded(self, rate: float) -> tuple[Phase, Used]:
        crowd, ramp_s, seconds = self._crowd(), 2 * BIN_S, self._arguments.seconds
        crowd.spawn(crowd.come(rate, ramp_s + seconds, self._arguments.obeying))
        await asyncio.sleep(ramp_s)
        at_start = Reading.of(self._node)
        phase = await self._measured(crowd, seconds)
        return phase, Used(at_start, Reading.of(self._node))

    async def _measured(self, crowd: Crowd, seconds: float) -> Phase:
        started_at_s = time.monotonic()
        await asyncio.sleep(seconds)
        ended_at_s = time.monotonic()
        await crowd.leave()
        await self._node.idle()
        good = [
            attempt
            for attempt in attempts(crowd.requests)
            if attempt.ttft_s <= self._arguments.ttft
            and attempt.took_s <= self._arguments.deadline
            and started_at_s <= (attempt.ended_at_s or 0.0) < ended_at_s
        ]
        return Phase(crowd.requests, started_at_s, ended_at_s - started_at_s, good)

    def _crowd(self) -> Crowd:
        return Crowd(self._asker, self._chats.next, self._rng)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table; exit status 1 where something was missed."""
    return measure_node(arguments, lambda node: Overload(arguments, node).run(), keys=arguments.keys)


def _throughput(
    alone: Sequence[Phase], over: Phase, rate: float, arguments: argparse.Namespace
) -> list[Finding]:
    ttfts = [attempt.ttft_s for attempt in attempts(over.requests) if attempt.first_at_s is not None]
    late = [
        attempt for attempt in attempts(over.requests) if attempt.whole and attempt.ttft_s > arguments.ttft
    ]
    name = "completion_tokens"
    return [
        findings.unjudged("clients/s that came", f"{rate:.1f}"),
        findings.unjudged(
            "good answers/s: alone before, overloaded, alone after",
            f"{alone[0].per_s:.2f}, {over.per_s:.2f}, {alone[1].per_s:.2f}",
        ),
        findings.judged(
            "good answers/s, over those without overload",
            bootstrap_ratio(over.bins(), _bins(alone)),
            "higher",
            GOODPUT,
        ),
        findings.unjudged(
            "their tokens/s, over those without overload",
            findings.shown(bootstrap_ratio(over.bins(name), _bins(alone, name))),
        ),
        findings.unjudged("answers whose first token came late", len(late)),
        findings.unjudged("TTFT p50, p99, s", f"{percentile(ttfts, 50):.2f}, {percentile(ttfts, 99):.2f}"),
    ]


def _retries(requests: Sequence[ClientRequest]) -> list[Finding]:
    came = [request for request in requests if request.obeys and len(request.attempts) > 1]
    let_in = sum(request.attempts[1].status == 200 for request in came)
    refused = [
        request for request in requests if request.attempts and request.attempts[0].status in (429, 503)
    ]
    hopeless = sum(not request.attempts[0].should_retry for request in refused)
    return [
        findings.unjudged("refused at first; of them told not to come again", f"{len(refused)}; {hopeless}"),
        findings.unjudged("came back when told", len(came)),
        findings.judged(
            "of them let in at their first retry", share(let_in, len(came)), "higher", FIRST_RETRY
        ),
    ]


def _bins(phases: Sequence[Phase], weight: str = "") -> list[float]:
    return [total for phase in phases for total in phase.bins(weight)]
