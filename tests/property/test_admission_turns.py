"""Turns: fair by served tokens, long requests wait and then have theirs, nobody starves. In virtual time."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core import Tier
from tests.support.admissions import TUNING, Node, Seen, Service, key_of, percentile, run_virtually, tenant_of

ENDLESS = {"max_queued_requests": 10_000, "max_queued_tokens": 1 << 40, "deadline_s": 1e6}
SMALL = Service(capacity_tokens=6_000)
LIKE_TWO_CORES = Service(16_384, prefill_tokens_per_s=6000, step_s=0.02, step_per_request_s=0.0007, quantum=2)
TIERS = st.sampled_from(["interactive", "standard", "batch"])
REQUESTS = st.lists(
    st.tuples(st.sampled_from("abc"), st.integers(1, 5_000), st.integers(1, 800)), min_size=1, max_size=60
)


def everything(requests: Sequence[tuple[str, int, int]], tiers: dict[str, Tier], seed: int) -> Node:
    """All requests at once; until the last has ended."""
    nodes = []

    async def main() -> None:
        node = Node(SMALL, ENDLESS, seed)
        nodes.append(node)
        asked = [node.ask(key_of(k, tiers[k]), prompt, tokens, 900) for k, prompt, tokens in requests]
        await asyncio.gather(*asked)
        node.stop()

    run_virtually(main)
    return nodes[0]


@given(REQUESTS, st.fixed_dictionaries({"a": TIERS, "b": TIERS, "c": TIERS}), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_everyone_has_a_turn(requests: list[tuple[str, int, int]], tiers: dict[str, Tier], seed: int) -> None:
    """Whatever waits, of whatever size and tier, is served to its end, and nothing is left reserved."""
    node = everything(requests, tiers, seed)
    assert all(seen.ended_s is not None for seen in node.seen)
    admission = node.admission
    assert (
        admission.scheduler.kv_pools.committed_tokens,
        admission.scheduler.kv_pools.num_allocations,
    ) == (0, 0)
    assert admission.scheduler.prefill_window.waiting_tokens == 0
    assert not admission.queue
    assert admission.queue.tokens == 0
    assert all(not tenant.active and not tenant.in_flight_tokens for tenant in admission.queue.tenants)
    assert abs(admission.queue.active_weight) < 1e-9


@given(
    st.tuples(st.integers(10, 1500), st.integers(10, 800)),
    st.tuples(st.integers(10, 1500), st.integers(10, 800)),
    st.sampled_from([1.0, 2.0, 4.0]),
    st.integers(0, 99),
)
@settings(max_examples=12, deadline=None)
def test_two_backlogged_keys_are_served_alike(
    left: tuple[int, int], other: tuple[int, int], weight: float, seed: int
) -> None:
    """While both wait, their served tokens by weight differ by no more than one request, the largest.

    Measured once what was let in has ended. How long answers become is known here.
    """
    ends: list[tuple[float, float]] = []

    async def main() -> None:
        node = Node(SMALL, ENDLESS, seed)
        weights = {"one": weight, "other": 1.0}
        for name, (prompt, tokens) in (("one", left), ("other", other)):
            for _ in range(150):
                node.spawn(node.ask(key_of(name, weight=weights[name]), prompt, tokens, exact=True))
        await asyncio.sleep(30)
        tenants = [tenant_of(node.admission, name) for name in ("one", "other")]
        node.admission.scheduler.next = lambda _now_s: None  # type: ignore[method-assign,assignment]
        await asyncio.sleep(120)
        if all(len(tenant.waiting) > 5 for tenant in tenants):
            ends.append((tenants[0].served, tenants[1].served))
        node.stop()

    run_virtually(main)
    for first, second in ends:
        assert abs(first - second) <= max(sum(left) / weight, sum(other))


def test_ten_minutes_of_two_backlogged_keys() -> None:
    """Short answers against long ones, equal weights: served tokens within 5% of one another."""

    async def main() -> None:
        node = Node(Service(capacity_tokens=30_000), ENDLESS)

        async def client(name: str, prompt: int, tokens: int) -> None:
            while True:
                await node.ask(key_of(name), prompt, tokens, 1000)

        for _ in range(60):
            node.spawn(client("short", 150, 60))
            node.spawn(client("long", 900, 600))
        await asyncio.sleep(600)
        served = dict.fromkeys(("short", "long"), 0)
        for seen, size in ((s, 150 if s.key == "short" else 900) for s in node.seen):
            if seen.first_s is not None:
                served[seen.key] += seen.tokens + size
        node.stop()
        assert abs(served["short"] - served["long"]) < 0.05 * served["long"], served
        assert node.engine.overflows == 0

    run_virtually(main)


@pytest.mark.parametrize("insists", [False, True])
@pytest.mark.parametrize("weight", [1.0, 2.0])
def test_backlogged_keys_that_are_sent_away(insists: bool, weight: float) -> None:
    """With a queue as short as the settings have it, refusals by the hundred: within 5% in five minutes.

    Clients obey, or come back every second with something else, which leaves retry slots that nobody keeps.
    """
    sizes = {"short": ((40, 120), (20, 60)), "long": ((400, 1200), (100, 400))}

    async def main() -> None:
        node = Node(LIKE_TWO_CORES, {"wait_of_ttft": 0.4})

        async def client(name: str, weight: float) -> None:
            prompt, tokens = (_between(node.rng, ends) for ends in sizes[name])
            while True:
                seen = await node.ask(key_of(name, weight=weight), prompt, tokens, retries=0, exact=True)
                if seen.ended_s is None:
                    told_s = seen.refused[-1].retry_after_s or 1
                    await asyncio.sleep(1 if insists else told_s)
                prompt, tokens = (_between(node.rng, ends) for ends in sizes[name])

        for _ in range(40):
            node.spawn(client("short", 1.0))
            node.spawn(client("long", weight))
        await asyncio.sleep(320)
        served = Counter[str]()
        for seen in node.seen:
            if seen.ended_s is not None and seen.ended_s > 20:
                served[seen.key] += seen.tokens + seen.prompt_tokens
        refused = {seen.key for seen in node.seen if seen.refused}
        node.stop()
        assert refused == {"short", "long"}
        assert abs(served["long"] / weight - served["short"]) < 0.05 * served["short"], served

    run_virtually(main)


def _between(rng: random.Random, ends: tuple[int, int]) -> int:
    low, high = ends
    return round(low * (high / low) ** rng.random())


def test_a_key_of_weight_two_is_served_twice_the_tokens() -> None:
    """Five minutes of three backlogged keys of weights 2, 1 and 0.5, long requests and short: within 5%."""
    weights = {"two": 2.0, "one": 1.0, "half": 0.5}
    sizes = {"two": (900, 600), "one": (150, 60), "half": (400, 200)}

    async def main() -> None:
        node = Node(Service(capacity_tokens=30_000), ENDLESS)

        async def client(name: str, prompt: int, tokens: int) -> None:
            while True:
                await node.ask(key_of(name, weight=weights[name]), prompt, tokens, 1000)

        for name, size in sizes.items():
            for _ in range(60):
                node.spawn(client(name, *size))
        await asyncio.sleep(300)
        served = dict.fromkeys(weights, 0.0)
        for seen in node.seen:
            if seen.first_s is not None:
                served[seen.key] += (seen.tokens + sizes[seen.key][0]) / weights[seen.key]
        node.stop()
        assert max(served.values()) < 1.05 * min(served.values()), served

    run_virtually(main)


def light_key(flood: bool) -> list[Seen]:
    """What a key with one short request a second sees, with or without another's 50 long ones at once."""
    results: list[Seen] = []

    async def main() -> None:
        node = Node(Service(capacity_tokens=60_000), ENDLESS)

        async def heavy() -> None:
            while True:
                await node.ask(key_of("heavy"), 1000, 1500, 2000)

        for _ in range(50 if flood else 0):
            node.spawn(heavy())
        await asyncio.sleep(90)  # until it is known how long they become
        for _ in range(120):
            await asyncio.sleep(1)
            node.spawn(node.ask(key_of("light"), 100, 20, 50))
        await asyncio.sleep(30)
        results.extend(seen for seen in node.seen if seen.key == "light")
        node.stop()

    run_virtually(main)
    return results


def test_a_flood_does_not_make_a_light_key_wait() -> None:
    """Room is kept for it: it is let in at once, but for the prompts that are before the engine already."""
    waits = [seen.admitted_s - seen.at_s for seen in light_key(flood=True) if seen.admitted_s is not None]
    assert len(waits) == 120
    assert percentile(waits, 0.95) == 0
    assert max(waits) < 0.5


def test_a_flood_from_before_the_window_narrowed_holds_up_no_light_key() -> None:
    """Eight long answers, of which the target allows four: who comes meanwhile is let in at once."""

    async def main() -> None:
        node = Node(
            Service(200_000, step_s=0.006, step_per_request_s=0.001, quantum=1), ENDLESS, tpot_target_s=0.01
        )
        for _ in range(50):
            node.spawn(node.ask(key_of("heavy"), 100, 3000, exact=True))
        await asyncio.sleep(5)
        assert len(node.engine.running) > TUNING.decode_overrun * node.admission.scheduler.window.max_choices
        seen = await node.ask(key_of("light"), 100, 20, 50)
        node.stop()
        assert seen.admitted_s == seen.at_s

    run_virtually(main)


def test_of_many_keys_no_more_run_than_the_window_has() -> None:
    """Forty keys with a request each, again and again: not each has a place of its own."""
    running: list[int] = []

    async def main() -> None:
        node = Node(
            Service(200_000, step_s=0.006, step_per_request_s=0.001, quantum=1), ENDLESS, tpot_target_s=0.016
        )

        async def client(name: str) -> None:
            while True:
                await node.ask(key_of(name), 100, 200, exact=True)

        for number in range(40):
            node.spawn(client(f"k{number}"))
        await asyncio.sleep(60)
        for _ in range(60):
            await asyncio.sleep(1)
            running.append(len(node.engine.running))
        served = Counter(seen.key for seen in node.seen if seen.ended_s is not None)
        node.stop()
        assert len(served) == 40
        assert max(served.values()) - min(served.values()) <= 2

    run_virtually(main)
    assert max(running) <= 12


@pytest.mark.parametrize("n", [1, 3])
def test_a_target_for_tpot_is_kept_and_the_light_key_does_not_wait_for_it(n: int) -> None:
    """16 ms where a step takes 6 and 1 more for each that runs: ten run of a flood of 50, and who comes.

    Of requests of several choices as many fewer run.
    """
    running: list[int] = []

    async def main() -> None:
        service = Service(200_000, step_s=0.006, step_per_request_s=0.001, quantum=1)
        node = Node(service, ENDLESS, tpot_target_s=0.016)

        async def heavy() -> None:
            while True:
                await node.ask(key_of("heavy"), 100, 1000, exact=True, n=n)

        for _ in range(50):
            node.spawn(heavy())
        await asyncio.sleep(60)
        for _ in range(120):
            await asyncio.sleep(1)
            node.spawn(node.ask(key_of("light"), 100, 20, 50))
            running.append(n * len(node.engine.running))
        await asyncio.sleep(1)
        waits = [s.admitted_s - s.at_s for s in node.seen if s.key == "light" and s.admitted_s is not None]
        node.stop()
        assert len(waits) == 120
        assert max(waits) == 0

    run_virtually(main)
    assert max(running) <= 12
    assert sum(running) / len(running) >= 7


@pytest.mark.parametrize(
    ("n", "pool_tokens"), [(1, 400_000), (16, 400_000), (128, 400_000), (1, 20_000), (128, 20_000)]
)
def test_one_key_slows_another_s_answers_by_no_more_than_it_may(n: int, pool_tokens: int) -> None:
    """A step takes 6 ms and 1 more for each that runs: of three times 7 ms a flood gets what is left.

    Requests of more choices than that wait until nobody else has an answer running.
    """
    results: list[float] = []

    async def main() -> None:
        service = Service(pool_tokens, step_s=0.006, step_per_request_s=0.001, quantum=1)
        node = Node(service, key_slowdown=3.0)

        async def heavy() -> None:
            while True:
                await node.ask(key_of("heavy"), 100, 1000, exact=True, n=n)
                await asyncio.sleep(1)

        await node.ask(key_of("light"), 100, 1000, exact=True)
        for _ in range(50):
            node.spawn(heavy())
        for _ in range(10):
            began_s = node.loop.time()
            seen = await node.ask(key_of("light"), 100, 1000, exact=True)
            assert seen.admitted_s == seen.at_s == began_s
            results.append(node.loop.time() - began_s)
        node.stop()

    run_virtually(main)
    assert max(results) < 5 * 7.0
    assert sum(results) / len(results) < 3.2 * 7.0


def test_two_keys_that_both_have_a_backlog_fill_the_engine() -> None:
    """Neither has more than its share: nobody waits for a slower step."""
    running: list[int] = []

    async def main() -> None:
        service = Service(400_000, step_s=0.006, step_per_request_s=0.001, quantum=1)
        node = Node(service, ENDLESS, key_slowdown=3.0)

        async def client(name: str) -> None:
            while True:
                await node.ask(key_of(name), 100, 200, exact=True)

        for number in range(100):
            node.spawn(client(("a", "b")[number % 2]))
        for _ in range(60):
            await asyncio.sleep(1)
            running.append(len(node.engine.running))
        node.stop()

    run_virtually(main)
    assert sorted(running)[len(running) // 2] > 90


def test_short_requests_pass_a_long_one_and_then_wait_for_it() -> None:
    """A request that needs most of the pool is passed by others for about its own size, then has its turn."""

    async def main() -> None:
        node = Node(Service(capacity_tokens=20_000), ENDLESS)

        async def short() -> None:
            while True:
                await node.ask(key_of("a"), 500, 300, 400)

        for _ in range(60):
            node.spawn(short())
        await asyncio.sleep(5)
        long = node.spawn(node.ask(key_of("a"), 15_000, 100, 200))
        await asyncio.sleep(10)
        passed = [seen for seen in node.seen if seen.admitted_s is not None and seen.admitted_s > 5]
        seen = await asyncio.wait_for(long, 120)
        node.stop()
        assert passed
        assert seen.admitted_s is not None

    run_virtually(main)


def test_tiers_come_in_order_and_the_low_ones_come_too() -> None:
    """Interactive waits least, batch most; once aged, the lower ones get a part of what passes them."""

    async def main() -> None:
        node = Node(Service(capacity_tokens=20_000), ENDLESS)

        async def client(tier: Tier) -> None:
            while True:
                await node.ask(key_of(tier, tier), 300, 200, 300)

        for tier in ("interactive", "standard", "batch"):
            for _ in range(60):
                node.spawn(client(tier))
        await asyncio.sleep(300)
        tokens = {
            tier: sum(seen.tokens for seen in node.seen if seen.key == tier)
            for tier in ("interactive", "standard", "batch")
        }
        node.stop()
        assert tokens["interactive"] > 2 * tokens["standard"] > tokens["standard"] > 0
        assert tokens["batch"] > 0.05 * tokens["interactive"]

    run_virtually(main)


@pytest.mark.parametrize(
    ("pool_tokens", "num_batch_keys", "most_of_batch"),
    [(800, 1, 0.25), (2_000, 1, 0.25), (800, 6, 0.25), (2_000, 6, 0.5)],
)
def test_batch_does_not_run_in_the_place_of_refused_interactive_requests(
    pool_tokens: int, num_batch_keys: int, most_of_batch: float
) -> None:
    """They ask again 0.3 s later: batch has little more than its age gives it, and the engine stays full.

    Where `key_slowdown` holds the two interactive keys to their shares among eight, batch has the rest.
    """

    async def main() -> None:
        service = Service(pool_tokens, 50_000, step_per_request_s=0, quantum=1)
        node = Node(service, {"wait_of_ttft": 0.4}, key_slowdown=2.0)

        async def client(name: str, tier: Tier) -> None:
            while True:
                seen = await node.ask(key_of(name, tier), 10, 60, retries=0, exact=True)
                await asyncio.sleep(0 if seen.ended_s else 0.3)

        for number in range(pool_tokens // 60):
            node.spawn(client("i1", "interactive"))
            node.spawn(client("i2", "interactive"))
            node.spawn(client(f"b{number % num_batch_keys}", "batch"))
        await asyncio.sleep(60)
        tokens, refused = Counter[str](), Counter[str]()
        for seen in node.seen:
            tokens[seen.key[0]] += seen.tokens
            refused[seen.key[0]] += len(seen.refused)
        node.stop()
        assert refused["i"] > 50
        assert 0 < tokens["b"] < most_of_batch * tokens.total()
        assert tokens.total() > 0.7 * 60 * pool_tokens / 70 / 0.02

    run_virtually(main)


def test_idleness_earns_nothing() -> None:
    """A key that comes back after a minute is served as much as the one that was here, not more."""

    async def main() -> None:
        node = Node(Service(capacity_tokens=20_000), ENDLESS)

        async def client(name: str) -> None:
            while True:
                await node.ask(key_of(name), 300, 200, 300)

        for _ in range(60):
            node.spawn(client("here"))
        await asyncio.sleep(60)
        earlier = sum(seen.tokens for seen in node.seen)
        for _ in range(60):
            node.spawn(client("back"))
        await asyncio.sleep(60)
        back = sum(seen.tokens for seen in node.seen if seen.key == "back")
        here = sum(seen.tokens for seen in node.seen) - earlier - back
        node.stop()
        assert abs(back - here) < 0.2 * here

    run_virtually(main)
