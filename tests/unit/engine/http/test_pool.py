"""The gate for choices that continue elsewhere: few hold a place, none for ever."""

from __future__ import annotations

import asyncio

import pytest

from app.engine.http.pool import ContinueGate
from tests.support.sse_client import until

pytestmark = pytest.mark.anyio


async def test_who_leaves_lets_the_next_one_in() -> None:
    """And only one, however often it leaves."""
    gate = ContinueGate(places=2, place_s=60)
    leaving = [await gate.enter() for _ in range(2)]
    entering = [asyncio.create_task(gate.enter()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not any(task.done() for task in entering)
    leaving[0]()
    leaving[0]()
    await until(entering[0].done)
    await asyncio.sleep(0)
    assert not entering[1].done()
    leaving[1]()
    await until(entering[1].done)


async def test_nobody_holds_a_place_for_ever() -> None:
    """A server that gives no token does not stop all others."""
    gate = ContinueGate(places=1, place_s=0.01)
    first = await gate.enter()
    second = await asyncio.wait_for(gate.enter(), 5)
    first()
    third = asyncio.create_task(gate.enter())
    second()
    await asyncio.wait_for(third, 5)
