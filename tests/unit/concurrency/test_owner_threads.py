"""Threads at which owners take turns: whose call is next, how long it may take, and how it all ends."""

from __future__ import annotations

import asyncio
import gc
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from app.concurrency.owner_threads import Overdue, OwnerThreads, ThreadsClosed, WaitedTooLong, Work
from tests.support.sse_client import until

STUCK_S = 10.0
"""Seconds after which what a test holds up goes on: a test that fails is not to hang."""


@pytest.fixture
def threads() -> Iterator[Callable[..., OwnerThreads]]:
    """Makes pools that end with the test."""
    made: list[OwnerThreads] = []

    def make(workers: int = 1, **options: Any) -> OwnerThreads:
        made.append(OwnerThreads("test", workers, **options))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Held:
    """A call that runs until it is let go."""

    def __init__(self, pool: OwnerThreads) -> None:
        self._pool = pool
        self._go = threading.Event()
        self._entered = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def _hold(self) -> str:
        self._loop.call_soon_threadsafe(self._entered.set)
        self._go.wait(STUCK_S)
        return "held"

    async def begin(self, work: Work) -> asyncio.Task[str]:
        """Start it; returns once it runs."""
        task = asyncio.create_task(self._pool.run(work, self._hold))
        async with asyncio.timeout(STUCK_S):
            await self._entered.wait()
        return task

    def release(self) -> None:
        """Let it go."""
        self._go.set()


async def in_turn(pool: OwnerThreads, works: list[tuple[str, Work]]) -> list[str]:
    """The names of works that wait for one thread together, in the order in which they were run."""
    order: list[str] = []
    held = Held(pool)
    first = await held.begin(Work("nobody"))
    waiting = [asyncio.create_task(pool.run(work, order.append, name)) for name, work in works]
    await asyncio.sleep(0)
    held.release()
    await asyncio.gather(first, *waiting)
    return order


async def test_it_runs_a_call_in_a_thread_and_returns_what_it_does(threads):
    """In one that is not the caller's."""
    name = await threads().run(Work("ada"), lambda: threading.current_thread().name)
    assert name == "test_0"


async def test_what_a_call_raises_is_raised(threads):
    """A timeout of its own, too; and the thread is free again."""
    pool = threads()

    def late() -> None:
        raise TimeoutError("mine")

    with pytest.raises(TimeoutError, match="mine"):
        await pool.run(Work("ada", work_s=STUCK_S), late)
    with pytest.raises(ZeroDivisionError):
        await pool.run(Work("ada"), lambda: 1 / 0)
    assert await pool.run(Work("ada"), lambda: 1) == 1


async def test_an_iterator_that_ends_in_a_call_is_an_error_like_others(threads):
    """No future takes a StopIteration: the caller would wait for ever, and the thread be lost."""
    pool = threads()
    with pytest.raises(RuntimeError, match="StopIteration"):
        async with asyncio.timeout(STUCK_S):
            await pool.run(Work("ada"), lambda: next(iter(())))
    assert await pool.run(Work("ada"), str, 1) == "1"


async def test_a_thread_that_could_not_be_started_is_started_later(threads, monkeypatch):
    """Where the system has none left, calls fail, and later ones do not hang."""
    pool = threads()

    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await pool.run(Work("ada"), str, 1)
    async with asyncio.timeout(STUCK_S):
        assert await pool.run(Work("ada"), str, 2) == "2"


async def test_owners_take_turns(threads):
    """Call by call, however many one of them has."""
    works = [(f"ada {i}", Work("ada")) for i in range(3)] + [(f"bob {i}", Work("bob")) for i in range(2)]
    assert await in_turn(threads(), works) == ["ada 0", "bob 0", "ada 1", "bob 1", "ada 2"]


async def test_an_owners_small_work_goes_first_and_alike_work_in_order(threads):
    """Sizes are compared by powers of two."""
    sizes = {"long": 1025, "longer": 2000, "middle": 1023, "long too": 1024, "short": 3}
    works = [(name, Work("ada", size)) for name, size in sizes.items()]
    assert await in_turn(threads(), works) == ["short", "middle", "long", "longer", "long too"]


async def test_work_that_has_begun_is_done_before_the_next_of_its_owner(threads):
    """Else all of an owner's works would end at the end, and none in time."""
    pool = threads()
    order: list[str] = []

    async def calls(name: str) -> None:
        work = Work("ada")
        for _ in range(3):
            await pool.run(work, order.append, name)

    await asyncio.gather(*(calls(name) for name in "abc"))
    assert order == [*"aaa", *"bbb", *"ccc"]


async def test_waiting_is_no_part_of_what_calls_may_take(threads):
    """A limit that has run out on the way to the thread would have passed by the work of others."""
    pool, loop = threads(), asyncio.get_running_loop()
    held, work = Held(pool), Work("bob", work_s=STUCK_S, wait_s=STUCK_S)
    first = await held.begin(Work("ada"))
    began_s = loop.time()
    behind = asyncio.create_task(pool.run(work, lambda: "done"))
    await asyncio.sleep(0)
    reached: asyncio.Future[None] = loop.create_future()
    loop.call_later(0.05, reached.set_result, None)
    await reached
    held.release()
    assert await asyncio.gather(first, behind) == ["held", "done"]
    took_s = loop.time() - began_s
    assert work.wait_s is not None
    assert work.work_s is not None
    assert work.wait_s < STUCK_S - 0.04
    assert (STUCK_S - work.wait_s) + (STUCK_S - work.work_s) <= took_s  # no second is counted twice


async def test_calls_that_take_too_long_are_given_up(threads):
    """All calls of a work have one limit; the thread is free once the call has ended."""
    pool = threads()
    held = Held(pool)
    task = await held.begin(Work("ada", work_s=0.05))
    with pytest.raises(Overdue):
        await task
    behind = asyncio.create_task(pool.run(Work("bob", work_s=STUCK_S), lambda: "done"))
    await asyncio.sleep(0)
    assert not behind.done()
    held.release()
    assert await behind == "done"


async def test_who_waits_too_long_is_told(threads):
    """And leaves its turn to the next."""
    pool = threads()
    held = Held(pool)
    first = await held.begin(Work("ada"))
    with pytest.raises(WaitedTooLong):
        await pool.run(Work("bob", wait_s=0.01), lambda: None)
    held.release()
    assert await first == "held"
    assert await pool.run(Work("bob"), lambda: 1) == 1


async def test_nobody_waits_behind_a_call_that_hangs(threads):
    """Not who waits already, nor who comes; once it has returned, calls are run again."""
    pool = threads(hangs_after_s=0.05)
    held = Held(pool)
    first = await held.begin(Work("ada"))
    with pytest.raises(Overdue):
        await pool.run(Work("bob"), lambda: None)
    with pytest.raises(Overdue):
        await pool.run(Work("eve"), lambda: None)
    held.release()
    assert await first == "held"
    assert await pool.run(Work("bob"), lambda: 1) == 1


async def test_a_second_thread_serves_while_one_hangs(threads):
    """Nobody is refused then."""
    pool = threads(2, hangs_after_s=0.01)
    held = Held(pool)
    first = await held.begin(Work("ada"))
    await until(lambda: pool._num_hanging == 1)
    pool._hangs_after_s = STUCK_S  # a call that its thread begins late is none that hangs
    assert await asyncio.gather(*(pool.run(Work("bob"), lambda: 1) for _ in range(3))) == [1, 1, 1]
    held.release()
    assert await first == "held"


async def test_who_gives_up_leaves_the_turn_to_the_next(threads):
    """While it waits, and when its turn has just come."""
    pool = threads()
    held = Held(pool)
    first = await held.begin(Work("ada"))
    gone = [asyncio.create_task(pool.run(Work("ada"), lambda: None)) for _ in range(3)]
    behind = asyncio.create_task(pool.run(Work("bob"), lambda: "done"))
    await asyncio.sleep(0)
    for task in (first, *gone):
        task.cancel()
    held.release()
    assert await behind == "done"
    assert await pool.run(Work("ada"), lambda: 1) == 1


async def test_closed_threads_run_what_has_begun_and_nothing_else(threads):
    """Who waits is told at once; a second call to close does nothing."""
    pool = threads()
    held = Held(pool)
    first = await held.begin(Work("ada"))
    behind = asyncio.create_task(pool.run(Work("bob"), lambda: None))
    await asyncio.sleep(0)
    pool.close()
    pool.close()
    with pytest.raises(ThreadsClosed):
        await behind
    with pytest.raises(ThreadsClosed):
        await pool.run(Work("bob"), lambda: None)
    held.release()
    assert await first == "held"


async def test_an_error_holds_nothing_once_it_is_gone(threads):
    """What failed in a thread is freed without the collector, which looks seldom in a server."""

    class Argument:
        """Something large."""

    def fail(_argument: Argument) -> None:
        raise ValueError("wrong")

    argument = Argument()
    left = weakref.ref(argument)
    pool = threads()
    gc.disable()
    try:
        with pytest.raises(ValueError, match="wrong"):
            await pool.run(Work("ada"), fail, argument)
        await pool.run(Work("ada"), int)
        del argument
        assert left() is None
    finally:
        gc.enable()


HANGS = """
import asyncio, threading
from app.concurrency.owner_threads import Overdue, OwnerThreads, Work
async def main():
    pool = OwnerThreads("hangs")
    try:
        await pool.run(Work("ada", work_s=0.05), threading.Event().wait)
    except Overdue:
        print("overdue")
    pool.close()
asyncio.run(main())
"""


def test_a_call_that_hangs_does_not_keep_the_process():
    """It ends within EXIT_S, with the status that it would have."""
    ended = subprocess.run(
        [sys.executable, "-c", HANGS], capture_output=True, text=True, timeout=30, check=False
    )
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "overdue\n", "")
