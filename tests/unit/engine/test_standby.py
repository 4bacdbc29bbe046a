"""An engine beside the main one: started behind the others' backs, and again after each end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from app.core import ChatRequest, Health
from app.engine.scripted.engine import Script, ScriptedEngine
from app.engine.standby import SupervisedEngine
from app.errors import EngineFailed, EngineNotReady
from tests.support.sse_client import until

pytestmark = pytest.mark.anyio


class Fussy(ScriptedEngine):
    """Starts when it is let, or fails to; knows whether it was closed."""

    def __init__(self, on_death: Callable[[str], None], fails: str) -> None:
        super().__init__(Script(tokens=3), name="small", on_death=on_death)
        self.may_start = asyncio.Event()
        self.fails = fails
        self.closed = False

    async def start(self) -> None:
        """See Engine.start."""
        await self.may_start.wait()
        if self.fails:
            raise EngineFailed(self.fails)
        await super().start()

    async def aclose(self) -> None:
        """See Engine.aclose."""
        self.closed = True
        await super().aclose()


class World:
    """A standby and the engines that it has made."""

    def __init__(self) -> None:
        self.made: list[Fussy] = []
        self.fails = ""
        self.broken = ""
        self.standby = SupervisedEngine("small", self._make, first_pause_s=0.001)

    def _make(self, on_death: Callable[[str], None]) -> Fussy:
        if self.broken:
            raise FileNotFoundError(self.broken)
        self.made.append(Fussy(on_death, self.fails))
        return self.made[-1]

    async def another(self, number: int) -> Fussy:
        """The engine of that number, let start."""
        await until(lambda: len(self.made) >= number)
        self.made[number - 1].may_start.set()
        return self.made[number - 1]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    """Nothing started yet."""
    made = World()
    yield made
    await made.standby.aclose()


def asked() -> ChatRequest:
    """A request."""
    return ChatRequest("r", "ann", "small", {"messages": [{"role": "user", "content": "hi"}]}, 0)


async def test_nobody_waits_for_its_start(world: World) -> None:
    """Until then it takes nothing, and has a name but no model."""
    await world.standby.start()
    assert (world.standby.health(), world.standby.state) == (Health.STARTING, "starting")
    with pytest.raises(EngineNotReady, match="'small' is starting"):
        await world.standby.render(asked())
    await world.another(1)
    await until(lambda: world.standby.health() is Health.READY)
    assert (world.standby.model.id, world.standby.state) == ("small", "ready")


async def test_one_that_cannot_even_be_made_is_tried_again(world: World) -> None:
    """What is wrong may be mended meanwhile: a command that is not there, a file."""
    world.broken = "not found"
    await world.standby.start()
    await until(lambda: world.standby.num_failures > 0)
    assert world.standby.state == "down: FileNotFoundError"
    world.broken = ""
    await world.another(1)
    await until(lambda: world.standby.health() is Health.READY)


async def test_a_start_that_fails_is_tried_again(world: World) -> None:
    """The reason is told meanwhile, and what had begun is closed."""
    world.fails = "no memory"
    await world.standby.start()
    first = await world.another(1)
    await until(lambda: len(world.made) == 2)
    assert world.standby.state == "down: no memory"
    assert first.closed
    world.made[1].fails = ""
    await world.another(2)
    await until(lambda: world.standby.state == "ready")
    assert world.standby.num_failures == 1


async def test_the_next_takes_the_place_of_a_dead_one(world: World) -> None:
    """Until it has started the dead one is asked what was handed over; then that is closed."""
    await world.standby.start()
    first = await world.another(1)
    await until(lambda: world.standby.health() is Health.READY)
    prompt = await world.standby.render(asked())
    deltas = world.standby.generate("r", prompt)
    await anext(deltas)
    first.die("killed")
    assert (world.standby.health(), world.standby.state) == (Health.STARTING, "down: killed")
    with pytest.raises(EngineFailed):
        await anext(deltas)
    assert world.standby.pop_emitted_tokens("r") == 1
    await world.another(2)
    await until(lambda: world.standby.health() is Health.READY)
    assert first.closed


async def test_what_is_closed_starts_no_more(world: World) -> None:
    """In the middle of a start too."""
    await world.standby.start()
    await until(lambda: len(world.made) == 1)
    await world.standby.aclose()
    assert world.made[0].closed
    assert world.standby.health() is Health.DEAD
    await world.standby.aclose()
    assert len(world.made) == 1
