"""Admission, one request at a time: what is let in, what waits, what is refused, what is given back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from app.admission.admit import Admission
from app.admission.estimates import ThroughputProfile
from app.admission.ticket import Ticket
from app.core import ChatRequest, Counts, Delta, Health, Key, Prompt
from app.errors import Cancelled, Draining, KeyOverloaded, Overloaded
from app.metering.traffic import ITL_S, Histogram
from tests.support.admissions import (
    TUNING,
    Service,
    ServiceEngine,
    count_prompt,
    key_of,
    limits_of,
    tenant_of,
)


class World:
    """An admission whose clock the test turns."""

    def __init__(self, capacity: int = 1000, **limits: Any) -> None:
        self.now_s = 0.0
        self.number = 0
        self.abort_unread: Callable[[], str | None] = lambda: None
        self.engine = ServiceEngine(Service(capacity))
        settings, tuning = limits_of(**limits)
        self.admission = Admission(
            self.engine,  # type: ignore[arg-type]
            settings,
            ThroughputProfile(None, TUNING),
            tuning,
            count_prompt=count_prompt,
            itl=Histogram(ITL_S),
            clock_s=lambda: self.now_s,
            chance=lambda: 0.0,
            abort_unread=lambda: self.abort_unread(),  # noqa: PLW0108  # a test replaces it later
        )

    async def admit(
        self, tokens: int, name: str = "a", rid: str | None = None, key: Key | None = None
    ) -> Ticket:
        """Ask for a prompt of nine tokens of its own and an answer of exactly that many."""
        self.number += 1
        body = {"messages": [{"content": f"question {self.number}"}], "ignore_eos": True}
        request = ChatRequest(rid or f"r{self.number}", name, "m", body, 0, max_tokens=tokens)
        prompt = Prompt([self.number, *range(-8, 0)], tokens, None)
        return await self.admission.admit(request, prompt, key or key_of(name))

    @staticmethod
    def request(rid: str) -> ChatRequest:
        """A request of that id."""
        return ChatRequest(rid, "a", "m", {"messages": [], "ignore_eos": True}, 0, max_tokens=500)

    def later(self, tokens: int, name: str = "a", rid: str | None = None) -> asyncio.Task[Ticket]:
        """The same beside the test."""
        return asyncio.get_running_loop().create_task(self.admit(tokens, name, rid))


async def settled(*tasks: asyncio.Task[Any]) -> None:
    """Let tasks go as far as they can."""
    for _ in range(5):
        await asyncio.sleep(0)


def began(tokens: int = 1, cached: int = 0, reason: Any = None) -> Delta:
    """A delta with so many tokens so far."""
    return Delta(0, "text", "", (), Counts(9, tokens, cached), reason)


async def test_each_waiting_request_has_a_place() -> None:
    """Those behind the ones that the order looks at too, and none that runs."""
    world = World()
    world.admission.queue._tuning = replace(TUNING, max_scanned_of_key=1)
    await world.admit(900, rid="runs")
    waiting = [world.later(900, rid=f"w{number}") for number in range(3)]
    await settled(*waiting)
    assert world.admission.places() == {"w0": 1, "w1": 2, "w2": 3}
    for task in waiting:
        task.cancel()


def test_an_empty_node_admits_without_a_task_switch() -> None:
    """The coroutine ends at its first step."""
    world = World()
    coroutine = world.admit(100)
    with pytest.raises(StopIteration) as ended:
        coroutine.send(None)
    ended.value.value.release()
    assert world.admission.scheduler.kv_pools.committed_tokens == 0


async def test_a_request_waits_until_there_is_room() -> None:
    """What does not fit is let in when another ends."""
    world = World()
    first = await world.admit(800)
    second = world.later(500)
    await settled(second)
    assert not second.done()
    assert len(world.admission.queue) == 1
    first.on_delta(began())
    first.release()
    (await second).release()


async def test_while_the_engine_is_away_everybody_waits() -> None:
    """Those who wait keep their places, new ones come behind them, and all are let in once it is back."""
    world = World()
    first = await world.admit(800)
    waiting = world.later(500)
    await settled(waiting)
    world.engine.health_now = Health.STARTING
    world.admission.poll()
    first.release()  # its client has gone
    newcomer = world.later(10)
    await settled(waiting, newcomer)
    assert not waiting.done()
    assert not newcomer.done()
    world.engine.health_now = Health.READY
    world.admission.poll()
    await settled(waiting, newcomer)
    for task in (waiting, newcomer):
        (await task).release()


async def test_no_more_run_at_once_than_the_engine_has_places() -> None:
    """However much memory is free: its choices count, the rest wait here and not in the engine."""
    world = World(capacity=100_000)
    world.engine.max_running_reqs = 16
    world.admission.poll()
    first = await world.admit(10, "a")
    world.admission.poll()
    tasks = [world.later(10, "a") for _ in range(20)]
    await settled(*tasks)
    assert sum(task.done() for task in tasks) == 15
    first.release()
    await settled(*tasks)
    assert sum(task.done() for task in tasks) == 16
    for task in tasks:
        (await task).release()
    assert not world.admission.busy


async def test_what_is_larger_than_the_pool_goes_alone() -> None:
    """It has its turn when nothing else is in flight; the engine is to judge it."""
    world = World()
    first = await world.admit(100)
    large = world.later(5000)
    await settled(large)
    assert not large.done()
    first.release()
    (await large).release()


async def test_a_waiting_request_can_be_withdrawn() -> None:
    """Its client left: it is Cancelled, and leaves nothing."""
    world = World()
    first = await world.admit(900)
    second = world.later(500, rid="gone")
    await settled(second)
    world.admission.withdraw("gone")
    world.admission.withdraw("gone")
    with pytest.raises(Cancelled):
        await second
    first.release()
    assert not world.admission.queue
    assert world.admission.queue.active_weight == 0


@pytest.mark.parametrize("let_in", [False, True])
async def test_a_cancelled_task_leaves_nothing(let_in: bool) -> None:
    """Cancelled while it waits, or in the moment it is let in."""
    world = World()
    first = await world.admit(900)
    second = world.later(500)
    await settled(second)
    if let_in:
        first.release()
    second.cancel()
    with pytest.raises(asyncio.CancelledError):
        await second
    first.release()
    assert world.admission.scheduler.kv_pools.num_allocations == 0
    assert not world.admission.queue


async def test_who_waits_too_long_is_refused() -> None:
    """After its tier's deadline: queue_timeout, with a time to come back."""
    world = World()
    first = await world.admit(900)
    second = world.later(500)
    await settled(second)
    world.now_s = 11.0
    world.admission.poll()
    with pytest.raises(Overloaded) as refused:
        await second
    assert refused.value.code == "queue_timeout"
    assert refused.value.retry_after_s is not None
    first.release()


async def test_one_key_fills_half_of_the_queue() -> None:
    """The other half is for others; the one is told it is its share, 429."""
    world = World(
        max_queued_requests=10,
        max_queued_tokens=10**6,
        deadline_s=1e6,
    )
    flying = [await world.admit(900), await world.admit(50, "b")]
    tasks = [world.later(500) for _ in range(5)]
    await settled(*tasks)
    with pytest.raises(KeyOverloaded) as refused:
        await world.admit(500)
    assert refused.value.status == 429
    other = world.later(500, "b")
    await settled(other)
    assert len(world.admission.queue) == 6
    world.admission.refuse_waiting(lambda: Draining("The server is stopping."))
    for task in (*tasks, other):
        with pytest.raises(Draining):
            await task
    for ticket in flying:
        ticket.release()


async def test_who_comes_back_when_told_has_its_place() -> None:
    """The retry slot goes before requests without one; too early it is none."""
    world = World(max_queued_requests=4, deadline_s=1e6)
    first = await world.admit(900)
    tasks = [world.later(500) for _ in range(2)]
    await settled(*tasks)
    body = {"messages": [{"content": "the same"}], "ignore_eos": True}
    request = ChatRequest("back", "a", "m", body, 0, max_tokens=500)
    prompt = Prompt([7] * 300, 500, None)
    with pytest.raises(Overloaded) as refused:
        await world.admission.admit(request, prompt, key_of("a"))
    assert refused.value.retry_after_s is not None
    world.now_s = refused.value.retry_after_s - 1.0
    with pytest.raises(Overloaded):
        await world.admit(500)
    world.now_s = refused.value.retry_after_s + 0.0
    back = asyncio.get_running_loop().create_task(world.admission.admit(request, prompt, key_of("a")))
    await settled(back)
    assert len(world.admission.queue) == 3
    assert world.admission.load_shedder.retry_slots == {"kept": 1, "missed": 0}
    world.admission.refuse_waiting(lambda: Draining("The server is stopping."))
    await asyncio.gather(*tasks, back, return_exceptions=True)
    first.release()


@pytest.mark.parametrize("comes_back", [True, False])
async def test_a_retry_slot_is_kept_where_nobody_waits_any_more(comes_back: bool) -> None:
    """Who comes when told counts as come, also when there is room at once; who does not, as missed."""
    world = World(max_queued_requests=1, deadline_s=1e6)
    flying = [await world.admit(900)]
    waiting = world.later(500)
    await settled(waiting)
    prompt = Prompt([7] * 9, 500, None)
    request = ChatRequest("back", "a", "m", {"messages": [{"content": "the same"}]}, 0, max_tokens=500)
    with pytest.raises(Overloaded) as refused:
        await world.admission.admit(request, prompt, key_of("a"))
    flying.pop().release()
    (await waiting).release()
    assert refused.value.retry_after_s is not None
    world.now_s = refused.value.retry_after_s + 1.0
    if comes_back:
        (await world.admission.admit(request, prompt, key_of("a"))).release()
    world.now_s += 60.0
    world.admission.poll()
    assert world.admission.load_shedder.retry_slots == {
        "kept": int(comes_back),
        "missed": int(not comes_back),
    }


async def test_who_comes_back_for_a_shorter_answer_is_known_again() -> None:
    """Degraded mode may have cut `max_tokens` meanwhile: the retry slot is kept all the same."""
    world = World(max_queued_requests=2, deadline_s=1e6)
    first = await world.admit(900)
    waiting = world.later(500)
    await settled(waiting)
    prompt = [7] * 300
    with pytest.raises(Overloaded) as refused:
        await world.admission.admit(world.request("one"), Prompt(prompt, 500, None), key_of("a"))
    world.now_s = (refused.value.retry_after_s or 0) + 0.0
    back = asyncio.get_running_loop().create_task(
        world.admission.admit(world.request("two"), Prompt(prompt, 100, None), key_of("a"))
    )
    await settled(back)
    assert len(world.admission.queue) == 2
    world.admission.refuse_waiting(lambda: Draining("The server is stopping."))
    await asyncio.gather(waiting, back, return_exceptions=True)
    first.release()


async def test_what_would_be_refused_is_refused_by_the_precheck() -> None:
    """Before it is rendered; who comes when told is let pass, and with nobody waiting so is everyone."""
    world = World(max_queued_requests=1, deadline_s=1e6)
    body = {"messages": [{"content": "a question"}]}
    request = ChatRequest("checked", "a", "m", body, 0, max_tokens=500)
    world.admission.precheck(request, key_of("a"))
    first = await world.admit(900)
    waiting = world.later(500)
    await settled(waiting)
    with pytest.raises(Overloaded) as refused:
        world.admission.precheck(request, key_of("a"))
    assert refused.value.retry_after_s is not None
    world.now_s = float(refused.value.retry_after_s)
    world.admission.precheck(request, key_of("a"))
    assert world.admission.load_shedder.retry_slots == {"kept": 0, "missed": 0}
    world.admission.refuse_waiting(lambda: Draining("The server is stopping."))
    await asyncio.gather(waiting, return_exceptions=True)
    first.release()


@pytest.mark.parametrize("served_more", [0.0, 5000.0])
async def test_a_light_key_finds_room_beside_one_that_fills_the_node(served_more: float) -> None:
    """An eighth of the memory is kept for it; those who wait do not stand in its way, though served less.

    A key's counter goes back where its answers become shorter than was charged in advance.
    """
    world = World(capacity=10_000)
    flood = [world.later(1000, "heavy") for _ in range(30)]
    await settled(*flood)
    assert world.admission.busy
    for _ in range(3):
        world.admission.precheck(world.request("light"), key_of("light"))
        tenant_of(world.admission, "light").served += served_more
        ticket = await world.admit(100, "light")
        world.now_s += 0.1
        ticket.release()
    world.admission.refuse_waiting(lambda: Draining("The server is stopping."))
    for result in await asyncio.gather(*flood, return_exceptions=True):
        if isinstance(result, Ticket):
            result.release()


async def test_streams_nobody_reads_end_first() -> None:
    """While one waits for memory, as many are aborted as it needs, and none without need."""
    world = World()
    unread = {f"u{i}": await world.admit(200, rid=f"u{i}") for i in range(4)}
    aborted: list[str] = []

    def abort_unread() -> str | None:
        left = [rid for rid in unread if rid not in aborted]
        aborted.extend(left[:1])
        return left[0] if left else None

    world.abort_unread = abort_unread
    waiting = world.later(400)
    await settled(waiting)
    assert aborted == ["u0", "u1"]
    world.admission.poll()
    assert aborted == ["u0", "u1"]
    for rid in aborted:
        unread[rid].release()
    (await waiting).release()
    for rid in ("u2", "u3"):
        unread[rid].release()
    assert world.admission.scheduler.reclaimed_tokens == 0


async def test_a_shared_prompt_is_reserved_once() -> None:
    """Four requests with one prompt of 300 tokens fit where four prompts would not; images share nothing."""
    world = World(deadline_s=1e6)
    body = {"messages": [], "ignore_eos": True}

    def ask(rid: str, space: str | None) -> asyncio.Task[Ticket]:
        request = ChatRequest(rid, "a", "m", body, 0, max_tokens=50)
        prompt = Prompt(list(range(300)), 50, None, space=space)
        return asyncio.get_running_loop().create_task(world.admission.admit(request, prompt, key_of("a")))

    shared = [ask(f"s{i}", "") for i in range(4)]
    await settled(*shared)
    assert all(task.done() for task in shared)
    assert world.admission.scheduler.kv_pools.committed_tokens == 500
    with_images = [ask(f"i{i}", None) for i in range(2)]
    await settled(*with_images)
    assert [task.done() for task in with_images] == [True, False]
    for task in (*shared, *with_images):
        (await task).release()


async def test_what_was_reserved_too_much_is_given_back() -> None:
    """The counter of a key is what it was served in the end: uncached prompt and answer."""
    world = World()
    ticket = await world.admit(500)
    tenant = tenant_of(world.admission, "a")
    assert tenant.served == 509
    ticket.on_delta(began(1, cached=5))
    ticket.on_delta(began(20, cached=5, reason="stop"))
    ticket.release()
    ticket.release()
    assert tenant.served == 24


async def test_a_key_s_new_weight_holds_at_once() -> None:
    """Changed while it runs and waits: what is charged from then on counts by it, and nothing is left."""
    world = World(deadline_s=1e6)
    first = await world.admit(600)
    second = world.later(500)
    await settled(second)
    served_first = tenant_of(world.admission, "a").served
    third = await world.admit(50, key=key_of("a", weight=4.0))
    tenant = tenant_of(world.admission, "a")
    assert tenant.served == served_first + 59 / 4
    assert world.admission.queue.active_weight == tenant.weight == 4
    for ticket in (first, third):
        ticket.release()
    (await second).release()
    assert world.admission.queue.active_weight == 0


async def test_a_key_goes_to_another_tier_while_it_waits() -> None:
    """What waits keeps its place in its tier; what comes then is of the new one, and begins anew there."""
    world = World()
    first = await world.admit(950)
    waiting = world.later(500)
    await settled(waiting)
    moved = asyncio.get_running_loop().create_task(world.admit(500, key=key_of("a", "batch")))
    await settled(moved)
    queue = world.admission.queue
    assert [queue.depth(rank) for rank in range(3)] == [0, 1, 1]
    assert tenant_of(world.admission, "a").served == 0
    first.release()
    for task in (waiting, moved):
        (await task).release()
    assert not queue
    assert world.admission.queue.active_weight == 0


async def test_the_estimate_of_a_prompt_learns_how_much_of_prompts_is_new() -> None:
    """Prompts that take a fraction of what their letters say make room for more of their kind."""
    world = World(max_queued_tokens=2000, deadline_s=1e6)
    first = await world.admit(900)
    tasks = [world.later(400)]
    await settled(*tasks)
    body = {"messages": [{"content": "x" * 8000}], "ignore_eos": True}

    def request(rid: str) -> ChatRequest:
        return ChatRequest(rid, "b", "m", body, 0, max_tokens=10)

    with pytest.raises(Overloaded):
        world.admission.precheck(request("long"), key_of("c"))
    for number in range(20):
        prompt = Prompt([number + 100, *range(-8, 0)], 10, None)
        admit = world.admission.admit(request(f"b{number}"), prompt, key_of("b"))
        tasks.append(asyncio.get_running_loop().create_task(admit))
    await settled(*tasks)
    world.admission.precheck(request("long"), key_of("c"))
    world.admission.refuse_waiting(lambda: Draining("The server is stopping."))
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Ticket):
            result.release()
    first.release()


async def test_a_pool_that_is_smaller_after_a_restart_is_read_again() -> None:
    """Also where the restart was over between two looks; who fitted the larger one waits for room."""
    world = World()
    first = await world.admit(400)
    world.engine.model = replace(world.engine.model, kv_capacity_tokens=600)
    world.admission.poll()
    assert world.admission.scheduler.kv_pools.capacity_tokens == 600
    second = world.later(400)
    await settled(second)
    assert not second.done()
    first.release()
    (await second).release()


async def test_a_request_is_let_in_to_one_replica_s_pool() -> None:
    """Two that fit the sum of the pools and not one of them wait; the prompt says which replica it is."""
    world = World()
    world.engine.model = replace(world.engine.model, kv_capacity_tokens=2000, replicas=2)
    world.admission.poll()
    prompt = Prompt([1], 1, None)
    first, second = await world.admit(600), await world.admit(600)
    assert [ticket.with_replica(prompt).replica for ticket in (first, second)] == [0, 1]
    third = world.later(500)
    await settled(third)
    assert not third.done()
    second.release()
    assert (await third).with_replica(prompt).replica == 1
    for ticket in (first, await third):
        ticket.release()
    assert world.admission.scheduler.kv_pools.committed_tokens == 0
