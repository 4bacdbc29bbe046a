"""The memory for bodies: shared by what is left free, waited for shortly, given back."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import Unavailable
from app.intake.body_budget import MAX_WAITING, BodyBudget, BodyLease


async def lease(budget: BodyBudget, owner: str, size_bytes: int) -> BodyLease:
    """A lease that holds so much."""
    held = BodyLease(budget)
    await held.grow_to(owner, size_bytes)
    return held


async def test_a_caller_gets_half_and_leaves_as_much():
    """One caller's bodies take half of the memory, the next caller's half of the rest, and so on."""
    budget = BodyBudget(1000)
    await lease(budget, "ann", 500)
    assert not budget.fits("ann", 1)
    await lease(budget, "bob", 250)
    assert not budget.fits("bob", 1)
    assert budget.fits("eve", 125)


async def test_a_body_larger_than_the_memory_passes_alone():
    """A body limit above the memory for bodies is no deadlock: such a body is taken alone."""
    budget = BodyBudget(100)
    held = await lease(budget, "ann", 5000)
    assert not budget.fits("bob", 1)
    held.release()
    assert budget.fits("bob", 5000)


async def test_a_body_that_grows_beyond_half_of_the_memory_passes_alone():
    """As one that says its size first: nobody else has a body here."""
    budget = BodyBudget(100)
    held = await lease(budget, "ann", 40)
    await held.grow_to("ann", 90)
    assert not budget.fits("ann", 1)
    assert budget.held_bytes == 90


async def test_who_waits_is_let_in_when_room_is_given_back():
    """A release wakes those who wait; a second one changes nothing."""
    budget = BodyBudget(1000)
    held = await lease(budget, "ann", 400)
    waiting = asyncio.create_task(lease(budget, "ann", 300))
    await asyncio.sleep(0)
    assert not waiting.done()
    held.release()
    held.release()
    assert (await waiting) is not None
    assert budget.held_bytes == 300


async def test_a_lease_grows_by_what_is_missing():
    """A body that does not say its size is counted as it grows, once."""
    budget = BodyBudget(1000)
    held = await lease(budget, "ann", 100)
    await held.grow_to("ann", 300)
    await held.grow_to("ann", 200)
    assert budget.held_bytes == 300
    held.release()
    assert budget.held_bytes == 0


async def test_the_wait_is_short_and_its_queue_bounded(monkeypatch: pytest.MonkeyPatch):
    """Who finds no room is refused with a time to come back, at once where many wait already."""
    budget = BodyBudget(1000)
    held = await lease(budget, "ann", 500)
    waiting = [asyncio.create_task(lease(budget, "ann", 1)) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(Unavailable) as error:
        await lease(budget, "ann", 1)
    assert (error.value.code, error.value.retry_after_s) == ("too_many_bodies", 2)
    held.release()
    await asyncio.gather(*waiting)
    assert budget.held_bytes == MAX_WAITING
    monkeypatch.setattr("app.intake.body_budget.WAIT_S", 0.01)
    await lease(budget, "ann", 500 - MAX_WAITING)
    with pytest.raises(Unavailable):
        await lease(budget, "ann", 1)
    await lease(budget, "bob", 1)


async def test_who_gave_up_waiting_is_no_longer_in_the_way(monkeypatch: pytest.MonkeyPatch):
    """The places in the queue of those whose time is over are free again."""
    monkeypatch.setattr("app.intake.body_budget.WAIT_S", 0.01)
    budget = BodyBudget(1000)
    await lease(budget, "ann", 500)
    for _ in range(2):
        refused = await asyncio.gather(
            *(lease(budget, "ann", 1) for _ in range(MAX_WAITING)), return_exceptions=True
        )
        assert {type(error) for error in refused} == {Unavailable}
    assert not budget._waiting
