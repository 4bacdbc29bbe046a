"""Restarts with pauses that double, on a clock of the test."""

from __future__ import annotations

import asyncio

import pytest

from app.engine.restart import Backoff, restart_with_backoff


def test_pauses_double_up_to_the_longest_and_begin_again_after_a_reset() -> None:
    """After a reset the first pause comes again."""
    backoff = Backoff(1.0, 5.0)
    assert [backoff.next_s() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]
    backoff.reset()
    assert [backoff.next_s() for _ in range(2)] == [1.0, 2.0]


async def test_a_run_that_succeeded_makes_the_next_pause_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Failures lengthen the pauses; an end after a success is followed by the first pause."""
    outcomes = iter([False, False, True, False])
    pauses: list[float] = []

    async def run() -> bool:
        try:
            return next(outcomes)
        except StopIteration:
            raise asyncio.CancelledError from None

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)

    monkeypatch.setattr("app.engine.restart.asyncio.sleep", sleep)
    with pytest.raises(asyncio.CancelledError):
        await restart_with_backoff(run, Backoff(1.0, 60.0))
    assert pauses == [1.0, 2.0, 1.0, 2.0]
