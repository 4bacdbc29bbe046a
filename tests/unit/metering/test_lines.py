"""Lines: callers take turns, however many requests each has."""

from __future__ import annotations

import asyncio

import pytest

from app.errors import Overloaded, RateLimited
from app.metering.lines import Lines


async def served_in_order(callers: str) -> str:
    """Whom a single slot serves, one after the other, where the callers came in this order."""
    lines, slot, order = Lines("requests", 10, 100), asyncio.Semaphore(1), []

    async def request(caller: str) -> None:
        with lines.enter(caller) as turn:
            async with turn, slot:
                await asyncio.sleep(0)
                order.append(caller)

    async with asyncio.TaskGroup() as group:
        for caller in callers:
            group.create_task(request(caller))
    return "".join(order)


async def test_callers_take_turns():
    """Who has many requests is served one for each of the others'."""
    order = await served_in_order("aaaaabbbc")
    assert sorted(order) == sorted("aaaaabbbc")
    assert order.index("c") <= 2
    assert order.rindex("b") <= 6


async def test_a_caller_has_a_slot_at_a_time():
    """A second slot is for somebody else."""
    lines, slots = Lines("requests", 10, 100), asyncio.Semaphore(2)
    with lines.enter("a") as first, lines.enter("a") as second:
        assert first is second
        async with first, slots:
            assert second.locked()
            with lines.enter("b") as other:
                async with other, slots:
                    pass


async def test_a_callers_line_is_bounded():
    """The next is 429 and told when to come; another caller is let in, and a place that was left is free."""
    lines = Lines("requests", 2, 100)
    with lines.enter("a"):
        with lines.enter("a"):
            with pytest.raises(RateLimited, match="2 requests of this owner") as caught, lines.enter("a"):
                pass
            assert caught.value.retry_after_s == 1
            with lines.enter("b"):
                pass
        with lines.enter("a"):
            pass
    assert not lines._locks


async def test_all_lines_together_are_bounded():
    """Then it is the server that is full: 503."""
    lines = Lines("requests", 2, 2)
    with lines.enter("a"), lines.enter("b"), pytest.raises(Overloaded) as caught, lines.enter("c"):
        pass
    assert caught.value.retry_after_s == 1
