"""`bench fairness`: how much one key's load slows or starves another key.

First a *light* key sends one short request a second: alone, and while a *heavy* key of equal weight keeps 50
long requests before the server. The two take turns, so that both see the same speed of the machine. Then two
keys both want more than there is, one with short and one with long requests. Reported is what each is served,
in uncached prompt tokens and answer tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import numpy as np

from scripts.benchmarks import findings
from scripts.benchmarks.asking import Asker, Attempt
from scripts.benchmarks.chats import Chats, Shape
from scripts.benchmarks.crowd import Crowd, attempts
from scripts.benchmarks.findings import Finding
from scripts.benchmarks.node import Node, add_node_arguments, measure_node
from scripts.benchmarks.stats import bootstrap_ratio, percentile

LIGHT, HEAVY, SHORT, LONG = range(4)
LIGHT_CHATS = Shape(words=(60, 120), tokens=(16, 16), exact=1.0)
FLOODS = {
    "answers": Shape(words=(40, 120), tokens=(500, 1500), exact=0.8, max_tokens=2000),
    "prompts": Shape(words=(300, 600), tokens=(200, 600), exact=0.8, max_tokens=1000),
}
SHORT_CHATS = Shape(words=(20, 60), tokens=(20, 60), exact=1.0)
LONG_CHATS = Shape(words=(200, 600), tokens=(100, 400), exact=1.0)
MOST_SLOWER = 1.5
MOST_APART = 0.05
STEP_S = 10.0
INSIST_S = 1.0
"""How soon a client that is never content comes back, whatever it was told."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of `bench fairness`."""
    parser.add_argument(
        "--seconds", type=int, default=600, help="seconds with two backlogged keys; 0: none (default: 600)"
    )
    parser.add_argument(
        "--light",
        type=int,
        default=60,
        metavar="S",
        help="seconds of a light key's turn; 0: none (default: 60)",
    )
    parser.add_argument("--turns", type=int, default=3, help="turns alone and beside the flood (default: 3)")
    parser.add_argument("--flood", type=int, default=50, help="long requests at once (default: 50)")
    parser.add_argument(
        "--backlog", type=int, default=40, help="clients of each backlogged key (default: 40)"
    )
    parser.add_argument(
        "--of",
        choices=tuple(FLOODS),
        default="answers",
        help="what is long in the long requests (default: answers)",
    )
    parser.add_argument("--seed", type=int, default=1)
    add_node_arguments(parser)


class Fairness:
    """One run against one node with four keys."""

    def __init__(self, arguments: argparse.Namespace, node: Node) -> None:
        self._arguments = arguments
        self._node = node
        self._asker = Asker(node.port, node.keys, self._count)
        self._rng = random.Random(arguments.seed)  # noqa: S311  # reproducible, not secret
        self._chats = {
            key: Chats(node.model, shape, arguments.seed + key)
            for key, shape in enumerate((LIGHT_CHATS, FLOODS[arguments.of], SHORT_CHATS, LONG_CHATS))
        }
        self._served: Counter[int] = Counter()

    async def run(self) -> list[Finding]:
        """Both parts, those that have any time."""
        results: list[Finding] = []
        try:
            if self._arguments.light:
                results += await self._light_key()
            if self._arguments.seconds:
                results += await self._backlogged()
        finally:
            self._asker.close()
        return results

    async def _light_key(self) -> list[Finding]:
        alone: list[Attempt] = []
        beside: list[Attempt] = []
        flooding: list[Attempt] = []
        for turn in range(self._arguments.turns):
            alone += await self._one_a_second()
            flood = self._crowd()
            for _ in range(self._arguments.flood):
                flood.spawn(flood.in_turn(HEAVY))
            await asyncio.sleep(STEP_S)
            beside += await self._one_a_second()
            await flood.leave()
            flooding += attempts(flood.requests)
            await self._node.idle()
            both = f"{_p99_ms(alone):.0f} ms alone, {_p99_ms(beside):.0f} beside the flood"
            findings.tell(f"turn {turn + 1}: TTFT p99 {both}")
        return _light_findings(alone, beside, flooding)

    async def _one_a_second(self) -> list[Attempt]:
        """The light key for one turn; the first request warms up."""
        crowd = self._crowd()
        await crowd.once(LIGHT, obeys=False)
        for _ in range(self._arguments.light):
            crowd.spawn(crowd.want(LIGHT, obeys=False))
            await asyncio.sleep(1)
        await crowd.all_served()
        return attempts(crowd.requests[1:])

    async def _backlogged(self) -> list[Finding]:
        arguments, crowd = self._arguments, self._crowd()
        for _ in range(arguments.backlog):
            crowd.spawn(crowd.in_turn(SHORT, at_most_s=INSIST_S))
            crowd.spawn(crowd.in_turn(LONG, at_most_s=INSIST_S))
        await asyncio.sleep(2 * STEP_S)
        marks = [Counter(self._served)]
        for _ in range(max(round(arguments.seconds / STEP_S), 1)):
            await asyncio.sleep(STEP_S)
            marks.append(Counter(self._served))
        await crowd.leave()
        return _backlog_findings(marks, attempts(crowd.requests))

    def _crowd(self) -> Crowd:
        return Crowd(self._asker, lambda key: self._chats[key].next(key), self._rng, on_ended=self._settle)

    def _count(self, key: int, frames: int) -> None:
        """A frame has one token, nearly always; `_settle` knows the truth."""
        self._served[key] += frames

    def _settle(self, attempt: Attempt) -> None:
        self._served[attempt.key] += attempt.served_tokens - attempt.frames


def run(arguments: argparse.Namespace) -> int:
    """Measure, print the table; exit status 1 where something was missed."""
    return measure_node(arguments, lambda node: Fairness(arguments, node).run(), keys=4)


def _light_findings(alone: list[Attempt], beside: list[Attempt], flooding: list[Attempt]) -> list[Finding]:
    first, second = ([request.ttft_s for request in seen if request.whole] for seen in (alone, beside))
    p99 = bootstrap_ratio(second, first, partial(np.percentile, q=99))
    p50 = bootstrap_ratio(second, first, np.median)
    statuses = Counter(request.status for request in flooding)
    return [
        findings.unjudged("light key: requests alone, beside the flood", f"{len(alone)}, {len(beside)}"),
        findings.none_of("of them not answered", sum(not request.whole for request in (*alone, *beside))),
        findings.unjudged("TTFT p50 alone, beside, ms", f"{_ms(first, 50):.0f}, {_ms(second, 50):.0f}"),
        findings.unjudged("TTFT p99 alone, beside, ms", f"{_ms(first, 99):.0f}, {_ms(second, 99):.0f}"),
        findings.unjudged("TTFT p50, beside/alone", findings.shown(p50)),
        findings.judged("TTFT p99, beside/alone", p99, "lower", MOST_SLOWER),
        findings.unjudged("the flood: answers by status", dict(sorted(statuses.items()))),
    ]


def _backlog_findings(marks: Sequence[Counter[int]], seen: list[Attempt]) -> list[Finding]:
    total = {key: marks[-1][key] - marks[0][key] for key in (SHORT, LONG)}
    apart = abs(total[SHORT] - total[LONG]) / max(*total.values(), 1)
    steps = [
        [(later[key] - earlier[key]) / STEP_S for key in (SHORT, LONG)] for earlier, later in pairwise(marks)
    ]
    ended = {
        key: [request for request in seen if request.key == key and request.whole] for key in (SHORT, LONG)
    }
    statuses = {
        key: dict(sorted(Counter(request.status for request in seen if request.key == key).items()))
        for key in ended
    }
    sizes = {
        key: sum(request.served_tokens for request in ended[key]) / max(len(ended[key]), 1) for key in ended
    }
    return [
        findings.unjudged("backlogged: tokens of an answer with its prompt, short, long", _pair(sizes)),
        findings.unjudged("answers by status, short", statuses[SHORT]),
        findings.unjudged("answers by status, long", statuses[LONG]),
        findings.unjudged(
            "served tokens/s, short, long", _pair({k: v / (STEP_S * len(steps)) for k, v in total.items()})
        ),
        findings.unjudged(
            f"the same in {STEP_S:.0f} s, least and most",
            ", ".join(f"{min(s[i] for s in steps):.0f} to {max(s[i] for s in steps):.0f}" for i in (0, 1)),
        ),
        findings.within("served tokens apart", apart, MOST_APART),
    ]


def _pair(values: dict[int, float]) -> str:
    return f"{values[SHORT]:.0f}, {values[LONG]:.0f}"


def _ms(values_s: Sequence[float], percent: float) -> float:
    return percentile(values_s, percent) * 1e3


def _p99_ms(seen: Sequence[Attempt]) -> float:
    return _ms([request.ttft_s for request in seen if request.whole], 99)
