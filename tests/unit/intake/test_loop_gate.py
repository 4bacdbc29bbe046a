"""So many requests begin in one tick of the event loop, and owners take turns."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from app.intake import loop_gate
from app.intake.loop_gate import LONG_TICK_S, MAX_STARTS_PER_TICK, MIN_STARTS_PER_TICK, LoopGate


async def going_on(turns: LoopGate, owners: list[str]) -> list[list[str]]:
    """The owners of the requests that went on in each turn of the loop, if all come in the first."""
    seen: list[list[str]] = [[]]

    async def request(owner: str) -> None:
        await turns.take(owner)
        seen[-1].append(owner)

    tasks = [asyncio.create_task(request(owner)) for owner in owners]
    while not all(task.done() for task in tasks):
        await asyncio.sleep(0)
        seen.append([])
    return [turn for turn in seen if turn]


async def test_a_few_go_on_at_once():
    """In the turn in which they come."""
    assert await going_on(LoopGate(), ["ada"] * MAX_STARTS_PER_TICK) == [["ada"] * MAX_STARTS_PER_TICK]


async def test_many_go_on_in_parts():
    """As many in each turn, until none is left."""
    seen = await going_on(LoopGate(), ["ada"] * (5 * MAX_STARTS_PER_TICK // 2))
    assert [len(turn) for turn in seen] == [
        MAX_STARTS_PER_TICK,
        MAX_STARTS_PER_TICK,
        MAX_STARTS_PER_TICK // 2,
    ]


async def test_owners_take_turns():
    """Who has one request waits for one of each other owner, not for all of them."""
    seen = await going_on(LoopGate(), ["ada"] * (3 * MAX_STARTS_PER_TICK) + ["bob"] * 2)
    assert [turn.count("bob") for turn in seen] == [0, 2, 0, 0]


async def test_who_leaves_takes_no_place():
    """The next one goes on instead."""
    turns = LoopGate()
    first = [asyncio.create_task(turns.take("ada")) for _ in range(2 * MAX_STARTS_PER_TICK)]
    await asyncio.sleep(0)
    for task in first[MAX_STARTS_PER_TICK:]:
        task.cancel()
    assert await going_on(turns, ["ada"] * MAX_STARTS_PER_TICK) == [["ada"] * MAX_STARTS_PER_TICK]
    await asyncio.gather(*first, return_exceptions=True)


async def test_later_requests_find_room_again():
    """What went on in one turn is nothing to the next."""
    turns = LoopGate()
    for _ in range(3):
        assert await going_on(turns, ["ada"] * MAX_STARTS_PER_TICK) == [["ada"] * MAX_STARTS_PER_TICK]
        await asyncio.sleep(0)


async def test_fewer_go_on_while_turns_take_long(monkeypatch: pytest.MonkeyPatch):
    """Down to MIN_STARTS_PER_TICK; then more again."""
    now_s = 0.0

    def clock_s() -> float:
        nonlocal now_s
        now_s += step_s
        return now_s

    monkeypatch.setattr(loop_gate, "time", SimpleNamespace(monotonic=clock_s))
    turns, step_s = LoopGate(), 2 * LONG_TICK_S
    seen = await going_on(turns, ["ada"] * (MAX_STARTS_PER_TICK + 3 * MIN_STARTS_PER_TICK))
    assert [len(turn) for turn in seen] == [
        MAX_STARTS_PER_TICK,
        MIN_STARTS_PER_TICK,
        MIN_STARTS_PER_TICK,
        MIN_STARTS_PER_TICK,
    ]
    step_s = 0.0
    seen = await going_on(turns, ["ada"] * (3 * MAX_STARTS_PER_TICK))
    assert [len(turn) for turn in seen][-2:] > [MIN_STARTS_PER_TICK, MIN_STARTS_PER_TICK]
