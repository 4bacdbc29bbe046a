"""The load of the event loop: what is computed from its clocks, and that it reads them."""

from __future__ import annotations

import asyncio
import contextlib
import time

import pytest

from app.concurrency import loop_meter
from app.concurrency.loop_meter import LoopMeter


def test_the_share_and_the_lag_are_of_the_last_ten_seconds() -> None:
    """Older polls do not count: a burst of a minute ago is over."""
    meter = LoopMeter()
    for number in range(1, 9):
        meter.poll(0.5 * number, 0.45 * number, 0.5 * number - 3.0)
    assert meter.lag_s == 3.0
    for number in range(9, 30):
        meter.poll(0.5 * number, 3.6 + 0.125 * number, 0.5 * number - 0.25)
    assert meter.core_share == pytest.approx(0.25)
    assert meter.lag_s == pytest.approx(0.25)


def test_a_poll_before_its_time_is_not_late() -> None:
    """A timer may fire a moment early."""
    meter = LoopMeter()
    meter.poll(time.monotonic() + 1.0, time.thread_time() + 0.5, time.monotonic() + 2.0)
    assert meter.lag_s == 0.0
    assert 0.4 < meter.core_share < 0.6


async def test_it_reads_its_own_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loop that was kept busy for 0.1 s is late by that much."""
    monkeypatch.setattr(loop_meter, "POLL_S", 0.0)
    meter = LoopMeter()
    running = asyncio.create_task(meter.run())
    await asyncio.sleep(0)
    end_s = time.thread_time() + 0.1
    while time.thread_time() < end_s:
        pass
    while not meter.lag_s:
        await asyncio.sleep(0)
    running.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await running
    assert meter.lag_s >= 0.1
    assert meter.core_share > 0.0
