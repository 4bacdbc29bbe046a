"""The fair gate: owners take turns, however many requests each has."""

from __future__ import annotations

import asyncio

import pytest

from app.concurrency.fair_gate import FairGate
from app.errors import Overloaded, RateLimited


def bounded(max_per_owner: int = 10, max_total: int = 100, places: int = 1) -> FairGate:
    """A gate with a place for an owner at a time."""
    return FairGate(places, "requests", max_per_owner=max_per_owner, max_total=max_total, one_each=True)


async def served_in_order(gate: FairGate, owners: str) -> str:
    """Whom a gate serves, one after the other, where the owners' requests arrive in this order."""
    order = []

    async def request(owner: str) -> None:
        async with gate.place(owner):
            await asyncio.sleep(0)
            order.append(owner)

    async with asyncio.TaskGroup() as group:
        for owner in owners:
            group.create_task(request(owner))
    return "".join(order)


@pytest.mark.parametrize("one_each", [False, True])
async def test_owners_take_turns(one_each: bool):
    """Who has many requests is served one for each of the others'."""
    order = await served_in_order(FairGate(1, one_each=one_each), "aaaaabbbc")
    assert sorted(order) == sorted("aaaaabbbc")
    assert order.index("c") <= 2
    assert order.rindex("b") <= 6


async def test_an_owner_has_one_place_at_a_time_where_each_has_one():
    """A second place is for somebody else."""
    gate = bounded(places=2)
    async with gate.place("a"):
        second = asyncio.create_task(gate.acquire("a"))
        async with gate.place("b"):
            pass
        await asyncio.sleep(0)
        assert not second.done()
    await second
    gate.release("a")


async def test_without_that_an_owner_alone_has_all_places():
    """Nobody else wants them."""
    gate = FairGate(2)
    await gate.acquire("a")
    await gate.acquire("a")
    waiting = asyncio.create_task(gate.acquire("b"))
    await asyncio.sleep(0)
    assert gate.has_waiting
    assert not waiting.done()
    gate.release("a")
    await waiting
    assert not gate.has_waiting


async def test_an_owners_lower_ranks_are_first():
    """Then the older ones; another owner's turn does not depend on them."""
    gate, order = FairGate(1), []

    async def request(owner: str, rank: int, name: str) -> None:
        await gate.acquire(owner, (rank, 0))
        order.append(name)
        gate.release(owner)

    await gate.acquire("nobody")
    asked = [("a", 2, "late"), ("a", 1, "first"), ("a", 1, "second"), ("b", 9, "other")]
    tasks = [asyncio.create_task(request(*one)) for one in asked]
    await asyncio.sleep(0)
    gate.release("nobody")
    await asyncio.gather(*tasks)
    assert order == ["first", "other", "second", "late"]


async def test_who_leaves_takes_no_place():
    """Neither one who waits, nor one who leaves just when it is theirs."""
    gate = FairGate(1)
    await gate.acquire("a")
    waiting, granted, last = (asyncio.create_task(gate.acquire(owner)) for owner in "bcd")
    await asyncio.sleep(0)
    waiting.cancel()
    gate.release("a")
    granted.cancel()
    await asyncio.wait_for(last, 1)
    assert granted.cancelled()
    assert not gate.has_waiting


async def test_all_that_wait_can_be_refused():
    """A place that is taken stays; who arrives later waits again."""
    gate = FairGate(1)
    await gate.acquire("a")
    waiting = asyncio.create_task(gate.acquire("b"))
    await asyncio.sleep(0)
    gate.refuse_waiting(ZeroDivisionError)
    with pytest.raises(ZeroDivisionError):
        await waiting
    later = asyncio.create_task(gate.acquire("b"))
    await asyncio.sleep(0)
    assert not later.done()
    gate.release("a")
    await later


async def test_an_owners_requests_are_bounded():
    """The next is 429 and told when to return; another owner enters, and a place that was left is free."""
    gate = bounded(max_per_owner=2)
    with gate.enter("a"):
        with gate.enter("a"):
            with pytest.raises(RateLimited, match="2 requests of this owner") as caught, gate.enter("a"):
                pass
            assert caught.value.retry_after_s == 1
            with gate.enter("b"):
                pass
        with gate.enter("a"):
            pass
    assert not gate._entered


async def test_all_requests_together_are_bounded():
    """Then it is the server that is full: 503."""
    gate = bounded(max_per_owner=2, max_total=2)
    with gate.enter("a"), gate.enter("b"), pytest.raises(Overloaded) as caught, gate.enter("c"):
        pass
    assert caught.value.retry_after_s == 1
