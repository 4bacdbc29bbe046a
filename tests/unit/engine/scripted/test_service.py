"""The scripted engine whose requests share one pace and one pool; how each of them waits."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from math import log
from statistics import fmean, pstdev
from typing import Any

import pytest

from app.core import ChatRequest
from app.engine.scripted.engine import Script, ScriptedEngine
from app.engine.scripted.service import Run
from app.errors import EngineFailed
from tests.support.admissions import run_virtually

WORDS = 99
"""Of a prompt, whose tokens are these and its role."""


class Timed:
    """Answers of one engine in virtual time: when each token came."""

    def __init__(self, script: Script) -> None:
        self.engine = ScriptedEngine(script)
        self.at_s: dict[str, list[float]] = {}

    async def ask(self, rid: str, tokens: int, words: int = WORDS, **body: Any) -> None:
        text = " ".join(f"{rid}{number}" for number in range(words))
        body = {"messages": [{"role": "user", "content": text}], **body}
        request = ChatRequest(rid, "local", "scripted", body, 0, max_tokens=tokens)
        prompt = await self.engine.render(request)
        loop = asyncio.get_running_loop()
        deltas = self.engine.generate(rid, prompt)
        self.at_s[rid] = [loop.time() async for delta in deltas if delta.token_ids]


def timed(script: Script, *tokens: int) -> Timed:
    """So many requests at once, each with so many tokens."""
    found: list[Timed] = []

    async def main() -> None:
        one = Timed(script)
        found.append(one)
        await one.engine.start()
        await asyncio.gather(*(one.ask(f"r{number}", count) for number, count in enumerate(tokens)))
        assert one.engine.load().used_tokens == 0

    run_virtually(main)
    return found[0]


def test_prompts_that_wait_are_taken_in_together() -> None:
    """A pass takes 10 ms, and 100 tokens 100 ms: all three begin after 0.31 s."""
    seen = timed(Script(prefill_rate=1000, step_s=0.01), 1, 1, 1)
    assert [round(seen.at_s[f"r{number}"][0], 3) for number in range(3)] == [0.31] * 3


def test_so_much_prompt_is_taken_in_at_once_and_no_more() -> None:
    """Three of 10,000 tokens go one by one, a longer one than that by itself."""

    async def main() -> None:
        one = Timed(Script(prefill_rate=10_000))
        await one.engine.start()
        await asyncio.gather(*(one.ask(rid, 1, words=9_999) for rid in "abc"), one.ask("d", 1, words=19_999))
        assert [round(one.at_s[rid][0], 3) for rid in "abcd"] == [1.0, 2.0, 3.0, 5.0]

    run_virtually(main)


def test_a_step_gives_everyone_a_token() -> None:
    """Two answers at once come at the pace of one step, which takes longer for two."""
    seen = timed(Script(step_s=0.01, step_per_request_s=0.005), 50, 50)
    first, second = seen.at_s.values()
    assert len(first) == len(second) == 50
    assert round(first[-1] - first[9], 3) == round(40 * 0.02, 3)


def test_a_step_takes_the_longer_the_more_is_held() -> None:
    """An answer to 100 tokens at 0.1 ms each: its 2nd token takes 10 ms, its 101st twice that."""
    (at_s,) = timed(Script(tokens=200, step_per_held_token_s=1e-4, prefill_rate=1000), 101).at_s.values()
    assert round(at_s[1] - at_s[0], 4) == 0.01
    assert round(at_s[100] - at_s[99], 4) == 0.0199


def test_the_first_pass_after_a_pause_takes_longer() -> None:
    """5 ms, for two prompts that come at once, and again when there was nothing to do."""

    async def main() -> None:
        one = Timed(Script(prefill_rate=1000, step_s=0.01, wake_s=0.005))
        await one.engine.start()
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        await asyncio.gather(one.ask("a", 1), one.ask("b", 1))
        assert [round(one.at_s[rid][0] - begun_s, 3) for rid in "ab"] == [0.215, 0.215]
        await asyncio.sleep(1.0)
        begun_s = loop.time()
        await one.ask("c", 1)
        assert round(one.at_s["c"][0] - begun_s, 3) == 0.115

    run_virtually(main)


def test_passes_spread_about_their_time() -> None:
    """Steps of 10 ms with a deviation of a fifth: the same ones each time, half of them longer."""
    (at_s,) = timed(Script(tokens=2000, step_s=0.01, spread=0.2), 2000).at_s.values()
    steps_s = [later - earlier for earlier, later in pairwise(at_s)]
    logs = [log(step_s / 0.01) for step_s in steps_s]
    assert abs(fmean(logs)) < 0.02
    assert abs(pstdev(logs) - 0.2) < 0.02
    (again,) = timed(Script(tokens=2000, step_s=0.01, spread=0.2), 2000).at_s.values()
    assert again == at_s


def test_what_does_not_fit_the_pool_waits_for_it() -> None:
    """The third prompt of 100 tokens begins when one of two has left a pool of 260."""
    seen = timed(Script(pool=260, step_s=0.01), 20, 20, 20)
    assert seen.at_s["r2"][0] > seen.at_s["r0"][-1]
    assert seen.engine.load().num_retractions == 0


def test_a_full_pool_sets_the_last_one_aside() -> None:
    """Two answers of 100 tokens in a pool of 300: one is retracted, and both come whole."""
    seen = timed(Script(tokens=100, pool=300, step_s=0.01), 100, 100)
    assert [len(times) for times in seen.at_s.values()] == [100, 100]
    assert seen.engine.load().num_retractions == 1
    assert max(seen.at_s["r0"]) < max(seen.at_s["r1"])


def test_an_answer_may_be_told_not_to_end() -> None:
    """Ten tokens by itself, thirty where `ignore_eos` asks for all of them."""

    async def main() -> None:
        one = Timed(Script(tokens=10, step_s=0.01))
        await one.engine.start()
        await asyncio.gather(one.ask("a", 30), one.ask("b", 30, ignore_eos=True))
        assert [len(one.at_s[rid]) for rid in "ab"] == [10, 30]

    run_virtually(main)


def test_an_aborted_request_gives_its_room_back() -> None:
    """It ends within a step, and the pool is empty."""

    async def main() -> None:
        one = Timed(Script(tokens=1000, step_s=0.01))
        await one.engine.start()
        task = asyncio.get_running_loop().create_task(one.ask("r", 1000))
        await asyncio.sleep(1.0)
        one.engine.abort("r")
        await task
        assert 90 < len(one.at_s["r"]) < 110
        assert one.engine.load().used_tokens == 0

    run_virtually(main)


async def waiting(run: Run) -> asyncio.Task[None]:
    """A task that waits for the run to be woken."""
    task = asyncio.create_task(run.woken())
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_waiting_run_goes_on_when_woken():
    """One that waits returns without an error."""
    run = Run()
    task = await waiting(run)
    run.wake()
    await task


async def test_an_abort_wakes_a_run_and_ends_later_waits_at_once():
    """An aborted generation has nothing to wait for."""
    run = Run()
    task = await waiting(run)
    run.abort()
    await task
    await run.woken()


async def test_a_failed_run_raises_what_ended_it():
    """The engine's death reaches a generation that waits."""
    run = Run()
    task = await waiting(run)
    run.fail("The engine died.")
    with pytest.raises(EngineFailed, match="The engine died"):
        await task


async def test_waking_a_run_that_does_not_wait_changes_nothing():
    """Nothing is remembered: the next wait is one."""
    run = Run()
    run.wake()
    task = await waiting(run)
    run.wake()
    await task
