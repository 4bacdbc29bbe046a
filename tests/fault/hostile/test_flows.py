"""One caller's stream keeps its pace whatever another sends: its rate beside that, against its rate alone."""

from __future__ import annotations

import asyncio
import random
import statistics

import pytest

from scripts.benchmarks.attacks import Target, attack
from tests.support.hostile_grammars import AMBIGUOUS, NESTED, REFUSED
from tests.support.sglang_owners import ADMIN_KEY, LEAST_SHARE, Flow, Node
from tests.support.sse_client import fetch

pytestmark = [pytest.mark.sglang, pytest.mark.timed, pytest.mark.timeout(400)]

ATTACK_S, LONG_ATTACK_S = 8.0, 16.0
"""The bound on a key that slows others takes some 3 s to narrow, and up to 10 s where it follows another
attack of that key (app.admission.windows): the flood that is slowed by nothing else is the long one."""
ATTACKS = (
    *("stops", "stops_of_prompts", "stops_begun", "broken_characters"),
    *("biases", "biases_of_prompts", "biases_of_requests"),
    *("dead_ends", "numbers"),
)


def behind(letters: int) -> str:
    """Text that is all one way, longer than any walk."""
    chosen = random.Random(5)
    return "".join(chosen.choice("bcdefghijklmnopqrstuvwxyz") for _ in range(letters))


async def num_requests(node: Node) -> int:
    """Requests that SGLang has in hand."""
    headers = {"authorization": f"Bearer {ADMIN_KEY}"}
    engine = (await fetch(node.port, "GET", "/readyz", headers=headers)).json()["engine"]
    return int(engine["num_running_reqs"] + engine["num_queue_reqs"])


async def begun_flow(node: Node) -> Flow:
    """A stream of the other caller, at its pace, once nothing is left of what was asked before."""
    async with asyncio.timeout(60):
        while await num_requests(node):
            await asyncio.sleep(0.05)
    flow = await node.flow()
    await flow.rate(0.5)
    return flow


@pytest.fixture(scope="module")
async def alone(node: Node) -> float:
    """Tokens per second of such a stream when nothing else is asked; the median, as they vary twofold."""
    rates = []
    for _ in range(5):
        flow = await begun_flow(node)
        rates.append(await flow.rate(1.5))
        await flow.close()
    return statistics.median(rates)


async def test_another_stream_flows_beside_grammars_that_are_refused(node: Node, alone: float):
    """While each is examined and refused, the stream keeps its pace."""
    flow = await begun_flow(node)
    beside = {}
    for name, (_, parameters) in REFUSED.items():
        asked = asyncio.create_task(node.ask(node.hostile, **parameters))
        beside[name] = await flow.rate(1.5)
        assert (await asked).status == 400, name
        await flow.close()
        flow = await begun_flow(node)
    await flow.close()
    assert min(beside.values()) > LEAST_SHARE * alone, (alone, beside)


@pytest.mark.parametrize("parameters", ["regex", "ebnf"])
async def test_a_grammar_that_turns_slow_is_ended_alone(node: Node, alone: float, parameters: str):
    """Beyond the walk the guard ends it with an error event, billed for what came; the other stream flows."""
    late = {
        "regex": {"regex": behind(900) + NESTED},
        "ebnf": {"ebnf": f'root ::= "{behind(900)}" s\n{AMBIGUOUS}'},
    }
    flow = await begun_flow(node)
    asked = asyncio.create_task(
        node.ask(node.hostile, **late[parameters], max_tokens=6000, min_tokens=3000, stream=True)
    )
    rates = []
    while not asked.done():
        rates.append(await flow.rate(0.5))
    answer = await asked
    await flow.close()
    assert answer.status == 200, answer.body
    *_, last, done = answer.body.decode().strip().split("\n\n")
    assert done.endswith("data: [DONE]")
    assert '"code":"grammar_too_slow"' in last
    assert f'"param":"{parameters}"' in last
    logged = [line for line in node.server.log if line.get("error") == "grammar_too_slow"][-1]
    assert logged["completion_tokens"] > 512
    assert sum(rates) / len(rates) > LEAST_SHARE * alone
    assert (await node.ask(node.other)).status == 200


@pytest.mark.parametrize("name", ATTACKS)
async def test_another_stream_flows_beside_an_attack(node: Node, alone: float, name: str):
    """It keeps a fair part of the tokens per second that it has alone, and nothing breaks."""
    flow = await begun_flow(node)
    target = Target(node.port, node.hostile["authorization"].removeprefix("Bearer "), "tokenring-builtin")
    attack_s = LONG_ATTACK_S if name == "biases_of_prompts" else ATTACK_S
    attacking = asyncio.create_task(attack(name, target, attack_s))
    await target.begun.wait()
    beside = await flow.rate(attack_s - 0.5)
    await attacking
    await flow.close()
    assert {status for status in target.statuses if status >= 500} <= {503}
    assert beside > LEAST_SHARE * alone
