"""Responses by route and status: numbers, and labels that no client chooses."""

from __future__ import annotations

from app.metering.responses import NO_ROUTE, ResponseCounts


def test_responses_are_counted_by_route_and_status():
    """Each status of a route has a number; what met no route has a place of its own."""
    counts = ResponseCounts()
    for status, route in ((200, "/b"), (200, "/b"), (401, "/b"), (200, "/a")):
        counts.add(status, route)
    counts.add(503)
    assert counts.by_route() == {"/a": {"200": 1}, "/b": {"200": 2, "401": 1}, NO_ROUTE: {"503": 1}}
