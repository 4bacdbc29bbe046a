"""The processes that check grammars: killed when one is slow, never in the way of another owner's."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator

import pytest
import xgrammar

from app.engine.grammar import pool as pool_module
from app.engine.grammar.cost import GrammarBudget
from app.engine.grammar.pool import MAX_WAITING_PER_OWNER, GrammarVerdict, WorkerPool, WorkerSetup
from app.engine.sglang.grammar import GrammarCheck
from app.errors import BadRequest, EngineNotReady, GrammarTooSlow, RateLimited
from tests.support.sse_client import until

MANY_RULES = "root ::= r0\n" + "\n".join(
    f'r{i} ::= r{(i * 7 + 1) % 1500} r{(i * 3 + 2) % 1500} | r{(i + 1) % 1500} | "a" | ""'
    for i in range(1500)
)
"""Compiles for longer than any test waits."""


class Formed:
    """What the check reads of a chat request."""

    regex = ebnf = "given"
    response_format = tools = None


def setup(check_s: float = 1.0) -> WorkerSetup:
    """Over single bytes."""
    tokens = [*(bytes([value]) for value in range(256)), b"<end>"]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[256])
    return WorkerSetup(info.serialize_json(), True, None, GrammarBudget(check_s, 2.0))


@pytest.fixture(autouse=True)
def only_cpu_time_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy this machine is."""
    monkeypatch.setattr(pool_module, "CLOCK_FACTOR", 60)


@pytest.fixture
async def pool() -> AsyncIterator[WorkerPool]:
    """Two workers, of which one has started."""
    pool = WorkerPool(setup())
    await pool.start()
    yield pool
    await pool.aclose()


@pytest.fixture
async def check() -> AsyncIterator[GrammarCheck]:
    """Grammars of requests."""
    check = GrammarCheck(setup())
    await check.start()
    yield check
    await check.aclose()


async def test_a_slow_compile_is_killed_and_the_next_grammar_passes(pool: WorkerPool):
    """The verdict says what it may take."""
    slow = await pool.check("ann", "ebnf", MANY_RULES, 64)
    reason = "compiling and following it took over the 1 s that a grammar may take"
    assert slow == GrammarVerdict("slow", reason)
    assert await pool.check("ann", "regex", "[a-z]+", 64) == GrammarVerdict("passed")


async def test_another_owner_does_not_wait():
    """While one owner's slow grammars are checked, the other's pass."""
    pool = WorkerPool(setup(check_s=30))
    slow = [asyncio.create_task(pool.check("ann", "ebnf", MANY_RULES, 64)) for _ in range(3)]
    await asyncio.sleep(0)
    assert await pool.check("bob", "regex", "[a-z]+", 64) == GrammarVerdict("passed")
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)
    assert await pool.check("ann", "regex", "[a-z]+", 64) == GrammarVerdict("passed")
    await pool.aclose()


async def test_too_many_that_wait_are_refused(pool: WorkerPool):
    """With Retry-After."""
    slow = [
        asyncio.create_task(pool.check("ann", "ebnf", MANY_RULES, 64)) for _ in range(MAX_WAITING_PER_OWNER)
    ]
    await asyncio.sleep(0)
    with pytest.raises(RateLimited) as refused:
        await pool.check("ann", "regex", "[a-z]+", 64)
    assert refused.value.retry_after_s
    for task in slow:
        task.cancel()
    await asyncio.gather(*slow, return_exceptions=True)


async def test_a_worker_that_died_is_replaced(pool: WorkerPool):
    """Whoever killed it."""
    for process in pool._all:
        os.kill(process.pid, signal.SIGKILL)
        await process.wait()
    assert await pool.check("ann", "regex", "[a-z]+", 64) == GrammarVerdict("passed")


async def kill_one(pool: WorkerPool) -> None:
    """A caller leaves, and its worker is killed with the grammar."""
    leaving = asyncio.create_task(pool.check("ann", "ebnf", MANY_RULES, 64))
    await until(lambda: not pool._idle)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)


async def test_after_a_kill_the_next_grammar_finds_a_worker(pool: WorkerPool):
    """It is started in the background, and by no caller: one that waits for it and leaves does not end it."""
    await kill_one(pool)
    waiting = [asyncio.create_task(pool.check(owner, "regex", "[a-z]+", 64)) for owner in ("ann", "bob")]
    await until(lambda: pool._all and len(pool._gate._holders) == len(waiting))
    (process,) = pool._all
    waiting[0].cancel()
    assert await waiting[1] == GrammarVerdict("passed")
    assert pool._idle == [process]
    assert pool._all == {process}


async def test_a_pool_that_closes_waits_for_the_worker_that_starts(pool: WorkerPool):
    """It is killed, whoever waits for it, and no other one is started."""
    await kill_one(pool)
    waiting = asyncio.create_task(pool.check("bob", "regex", "[a-z]+", 64))
    await until(lambda: pool._gate._holders)
    await pool.aclose()
    assert pool._refilling is None
    with pytest.raises(EngineNotReady):
        await waiting
    assert not pool._all


async def test_no_worker_outlives_the_pool():
    """Busy or idle."""
    pool = WorkerPool(setup())
    await pool.start()
    busy = asyncio.create_task(pool.check("ann", "ebnf", MANY_RULES, 64))
    await asyncio.sleep(0.05)
    processes = list(pool._all)
    await pool.aclose()
    assert processes
    assert all(process.returncode is not None for process in processes)
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    assert all(process.returncode is not None for process in pool._all)


async def test_a_pool_that_closes_judges_no_grammar():
    """Those that run and those that wait are told that the engine stops; no worker starts afterwards."""
    pool = WorkerPool(setup(check_s=60.0), workers=1)
    await pool.start()
    waiting = [asyncio.create_task(pool.check(owner, "ebnf", MANY_RULES, 64)) for owner in ("ann", "bob")]
    await asyncio.sleep(0.05)
    await pool.aclose()
    results = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(result) for result in results] == [EngineNotReady, EngineNotReady]
    assert not pool._all


async def test_a_verdict_is_kept(check: GrammarCheck):
    """The second time no worker is asked."""
    await check.check("ann", {"regex": "[a-z]+"}, Formed())
    with pytest.raises(GrammarTooSlow, match="took over the 1 s"):
        await check.check("ann", {"ebnf": MANY_RULES}, Formed())
    await check._pool.aclose()
    await check.check("bob", {"regex": "[a-z]+"}, Formed())
    with pytest.raises(GrammarTooSlow):
        await check.check("bob", {"ebnf": MANY_RULES}, Formed())


async def test_a_verdict_by_the_clock_is_not_kept(check: GrammarCheck, monkeypatch: pytest.MonkeyPatch):
    """A worker that had no CPU says nothing of the grammar: the same is asked again."""
    monkeypatch.setattr(pool_module, "CLOCK_FACTOR", 0.05)
    [worker] = check._pool._idle
    worker.send_signal(signal.SIGSTOP)
    with pytest.raises(GrammarTooSlow, match=r"not through after .* if this machine was busy"):
        await check.check("ann", {"regex": "[a-z]+"}, Formed())
    monkeypatch.setattr(pool_module, "CLOCK_FACTOR", 60)
    await check.check("ann", {"regex": "[a-z]+"}, Formed())


async def test_a_client_that_leaves_does_not_cost_the_verdict(check: GrammarCheck):
    """The check goes on without it."""
    leaving = asyncio.create_task(check.check("ann", {"regex": "[a-z]+"}, Formed()))
    await asyncio.sleep(0)
    leaving.cancel()
    await asyncio.gather(leaving, return_exceptions=True)
    await asyncio.gather(*check._checks.values())
    await check._pool.aclose()
    await check.check("ann", {"regex": "[a-z]+"}, Formed())


async def test_what_is_no_grammar_is_refused_by_name(check: GrammarCheck):
    """As before there was a worker."""
    with pytest.raises(BadRequest, match="regex: not a valid grammar") as refused:
        await check.check("ann", {"regex": "(("}, Formed())
    assert (refused.value.code, refused.value.param) == ("invalid_value", "regex")
