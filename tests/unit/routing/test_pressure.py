"""How hard a queue is pressed: whose wait counts, and against what."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from app.admission.admit import Admission
from app.admission.estimates import LengthHistogram, Throughput, ThroughputProfile
from app.core import ChatRequest, Prompt, Tier
from app.errors import KeyOverloaded, Overloaded
from app.metering.traffic import ITL_S, Histogram
from app.routing.pressure import pressure_of
from tests.support.admissions import (
    TUNING,
    Service,
    ServiceEngine,
    count_prompt,
    key_of,
    limits_of,
    tenant_of,
)

SETTINGS, PATIENT = limits_of(queue_interactive_s=8.0, queue_standard_s=16.0, queue_batch_s=160.0)
"""Of a pool of 1,000 tokens that serves 125 a second, a standard key's line may have 500."""


class World:
    """A full engine, and those who wait for it."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.number = 0
        self.tasks: list[asyncio.Task[None]] = []
        engine = ServiceEngine(Service(1000))
        profile = ThroughputProfile(None, TUNING)
        measured = Throughput(125.0, 0.0, TUNING, TUNING.throughput_memory_s)
        profile.observe("m", measured, LengthHistogram(TUNING), 0.0)
        self.admission = Admission(
            engine,  # type: ignore[arg-type]
            SETTINGS,
            profile,
            PATIENT,
            count_prompt=count_prompt,
            itl=Histogram(ITL_S),
            clock_s=lambda: self.now_s,
            chance=lambda: 0.0,
        )

    @property
    def pressure(self) -> float:
        """As it is now."""
        return pressure_of(self.admission, self.now_s)

    async def ask(self, tokens: int, name: str = "a", tier: Tier = "standard") -> None:
        """Ask for an answer of exactly so many tokens, for ever."""
        self.number += 1
        body = {"messages": [], "ignore_eos": True}
        request = ChatRequest(f"r{self.number}", name, "m", body, 0, max_tokens=tokens)
        prompt = Prompt([self.number], tokens, None)
        admit = self.admission.admit(request, prompt, key_of(name, tier))
        task = asyncio.get_running_loop().create_task(_forever(admit))
        self.tasks.append(task)
        await asyncio.sleep(0)
        if task.done():
            task.result()


async def _forever(admit: object) -> None:
    await admit  # type: ignore[misc]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """With the engine full of what has run for a while."""
    made = World()
    await made.ask(970)
    made.now_s += 60.0
    yield made
    for task in made.tasks:
        task.cancel()
    await asyncio.gather(*made.tasks, return_exceptions=True)


async def test_without_a_queue_there_is_none(world: World) -> None:
    """However full the engine is."""
    assert world.pressure == 0


async def test_it_is_one_where_the_next_request_is_refused(world: World) -> None:
    """What a key's next request would wait, over what admission lets it; for a while after a refusal 1."""
    for waiting in range(1, 5):
        await world.ask(99)
        assert world.pressure == pytest.approx(waiting / 5)
    await world.ask(99)
    await world.ask(99)
    with pytest.raises(Overloaded):
        await world.ask(99)
    assert world.pressure >= 1
    for task in world.tasks[2:]:
        task.cancel()
    await asyncio.sleep(0)
    assert world.pressure >= 1
    world.now_s += 2.0
    assert world.pressure < 1


async def test_one_heavy_key_among_others_is_none(world: World) -> None:
    """The key in the middle counts, the lower one of two; who has not come for a minute is not here."""
    await world.ask(99, "b")
    world.tasks[-1].cancel()
    await asyncio.sleep(0)
    for _ in range(4):
        await world.ask(99)
    assert world.pressure == pytest.approx(0.1)  # of the queue, by all of them
    world.now_s += 61.0
    assert world.pressure == pytest.approx(0.8)


async def test_those_who_may_wait_are_none(world: World) -> None:
    """The tier batch, in the line and in how full the queue is."""
    for _ in range(12):
        await world.ask(99, "b", "batch")
    assert world.pressure == 0


async def test_who_was_told_to_come_now_counts(world: World) -> None:
    """As if it waited; one that is to come later does not yet."""
    await world.ask(99)
    slots = world.admission.load_shedder.slots_of(tenant_of(world.admission, "a"))
    slots.make(1, world.now_s, 100)
    slots.make(2, world.now_s + 60.0, 1000)
    assert world.pressure == pytest.approx(0.4)


async def test_a_full_queue_is_pressure(world: World) -> None:
    """Whatever each key's line is."""
    for number in range(40):
        try:
            await world.ask(95, f"k{number}")
        except (Overloaded, KeyOverloaded):
            break
    assert world.pressure > 0.9
