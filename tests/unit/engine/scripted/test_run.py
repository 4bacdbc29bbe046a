"""A scripted generation's waiting: woken, aborted, failed."""

import asyncio

import pytest

from app.engine.scripted.run import Run
from app.errors import EngineFailed


async def waiting(run: Run) -> asyncio.Task[None]:
    """A task that waits for the run to be woken."""
    task = asyncio.create_task(run.woken())
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_waiting_run_goes_on_when_woken():
    """One that waits returns without an error."""
    run = Run()
    task = await waiting(run)
    run.wake()
    await task


async def test_an_abort_wakes_a_run_and_ends_later_waits_at_once():
    """An aborted generation has nothing to wait for."""
    run = Run()
    task = await waiting(run)
    run.abort()
    await task
    await run.woken()


async def test_a_failed_run_raises_what_ended_it():
    """The engine's death reaches a generation that waits."""
    run = Run()
    task = await waiting(run)
    run.fail("The engine died.")
    with pytest.raises(EngineFailed, match="The engine died"):
        await task


async def test_waking_a_run_that_does_not_wait_changes_nothing():
    """Nothing is remembered: the next wait is one."""
    run = Run()
    run.wake()
    task = await waiting(run)
    run.wake()
    await task
