"""The circuit breaker: opens after failures in a row, closes by a probe alone."""

from __future__ import annotations

from app.engine.http.server import Breaker


def test_failures_in_a_row_open_it() -> None:
    """The third opens; a success in between starts the count again."""
    breaker = Breaker(threshold=3)
    for failed in (True, True, False, True, True):
        breaker.failed() if failed else breaker.succeeded()
    assert not breaker.is_open
    breaker.failed()
    assert breaker.is_open


def test_an_open_one_is_closed_by_a_probe_alone() -> None:
    """An answer that was under way may still end well; that does not say that new ones would."""
    breaker = Breaker()
    breaker.trip()
    breaker.succeeded()
    assert breaker.is_open
    breaker.failed()
    breaker.close()
    assert not breaker.is_open
    breaker.failed()
    assert not breaker.is_open
