"""`bench limits`: 500 clients at once, all of one key that may have 10,000 tokens a minute.

Each wants one answer, and returns after `Retry-After`. The requests that were served within any minute must
not use more tokens than the limit, by the ledger. The limit reserves what an answer may become at most.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Sequence

from scripts.benchmarks import findings
from scripts.benchmarks.asking import Asker, Attempt
from scripts.benchmarks.chats import Chats, Shape
from scripts.benchmarks.crowd import Crowd, attempts
from scripts.benchmarks.findings import Finding, statuses
from scripts.benchmarks.node import Node, Reading, Used, add_node_arguments, measure_node
from scripts.benchmarks.stats import share

WINDOW_S = 60.0
SKEW_S = 1.0
"""How much later than it was sent the server may have charged for a request: 500 come at once."""
CHATS = Shape(words=(20, 60), tokens=(60, 90), exact=0.5, max_tokens=90)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench limits`."""
    parser.add_argument("--clients", type=int, default=500, help="clients at once (default: 500)")
    parser.add_argument(
        "--tpm", type=int, default=10_000, help="tokens a minute of their key (default: 10,000)"
    )
    parser.add_argument("--seconds", type=int, default=200, help="seconds (default: 200)")
    parser.add_argument("--seed", type=int, default=1)
    add_node_arguments(parser, pool=0)


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table; exit status 1 where something was missed."""
    return measure_node(arguments, lambda node: _measure(arguments, node), keys=1, tpm=arguments.tpm)


async def _measure(arguments: argparse.Namespace, node: Node) -> list[Finding]:
    at_start = Reading.of(node)
    seen = await _crowd(arguments, node)
    return _findings(seen, Used(at_start, Reading.of(node)), arguments)


async def _crowd(arguments: argparse.Namespace, node: Node) -> Sequence[Attempt]:
    """All clients for so long; every attempt that ended."""
    asker = Asker(node.port, node.keys)
    chats = Chats(node.model, CHATS, arguments.seed)
    crowd = Crowd(asker, chats.next, random.Random(arguments.seed))  # noqa: S311  # reproducible, not secret
    try:
        for _ in range(arguments.clients):
            crowd.spawn(crowd.want(0, obeys=True))
        await asyncio.sleep(arguments.seconds)
        await crowd.leave()
    finally:
        asker.close()
    return attempts(crowd.requests)


def _findings(seen: Sequence[Attempt], used: Used, arguments: argparse.Namespace) -> list[Finding]:
    served = sorted((request for request in seen if request.whole), key=lambda request: request.sent_at_s)
    busiest_tokens = most_within(
        [(request.sent_at_s, request.prompt_tokens + request.completion_tokens) for request in served]
    )
    begun_s = min(request.sent_at_s for request in seen)
    again = [request for request in seen if request.sent_at_s > begun_s + WINDOW_S / 2]
    return [
        *statuses(seen),
        findings.within(
            "most tokens of requests that came within a minute", busiest_tokens, arguments.tpm, "{:.0f}"
        ),
        findings.unjudged(
            "tokens served", sum(request.prompt_tokens + request.completion_tokens for request in served)
        ),
        findings.unjudged(
            "of those who came back when told: let in",
            findings.shown(share(sum(request.status == 200 for request in again), len(again))),
        ),
        findings.unjudged("server, engine, whole machine busy, CPUs", used.cpus()),
    ]


def most_within(charges: Sequence[tuple[float, int]]) -> int:
    """The most tokens in any window, of charges in the order of their times."""
    busiest_tokens = total = first = 0
    for at_s, tokens in charges:
        total += tokens
        while charges[first][0] <= at_s - (WINDOW_S - SKEW_S):
            total -= charges[first][1]
            first += 1
        busiest_tokens = max(busiest_tokens, total)
    return busiest_tokens
