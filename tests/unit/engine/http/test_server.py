"""The circuit breaker: opens after failures in a row, closes by a probe alone, waits longer each time."""

from __future__ import annotations

from app.engine.http.server import Breaker


def test_failures_in_a_row_open_it() -> None:
    """The third opens; a success in between starts the count again."""
    breaker = Breaker(threshold=3)
    for failed in (True, True, False, True, True):
        breaker.failed(0.0) if failed else breaker.succeeded()
    assert not breaker.is_open
    breaker.failed(0.0)
    assert breaker.is_open


def test_an_open_one_is_closed_by_a_probe_alone() -> None:
    """An answer that was under way may still end well; that does not say that new ones would."""
    breaker = Breaker()
    breaker.trip(5.0)
    breaker.succeeded()
    assert breaker.is_open
    breaker.close()
    assert not breaker.is_open


def test_probes_come_at_growing_intervals() -> None:
    """Each failed probe doubles the pause, up to the longest; a good one starts over."""
    breaker = Breaker(first_pause_s=1.0, longest_pause_s=5.0)
    breaker.trip(10.0)
    pauses = [breaker.next_probe_s - 10.0]
    for _ in range(4):
        breaker.failed(20.0)
        pauses.append(breaker.next_probe_s - 20.0)
    assert pauses == [1.0, 2.0, 4.0, 5.0, 5.0]
    breaker.close()
    breaker.trip(30.0)
    assert breaker.next_probe_s == 31.0


def test_a_breaker_tripped_for_a_probe_is_due_at_once() -> None:
    """A server that has not shown its model yet gets a probe without a pause, and no request before."""
    breaker = Breaker()
    breaker.trip(5.0, probe_now=True)
    assert breaker.is_open
    assert breaker.next_probe_s == 5.0
