"""What was served, counted once a request."""

from __future__ import annotations

from app.core import Usage
from app.metering.traffic import ITL_S, NO_ROUTE, TPOT_S, TTFT_S, Histogram, ResponseCounts, Timings, Traffic


def test_a_value_counts_at_every_bound_it_does_not_exceed():
    """Bounds are inclusive, the last is infinite, and None is no observation."""
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 99.0, None):
        histogram.observe(value)
    assert histogram.cumulative() == [(1.0, 2), (2.0, 3), (float("inf"), 4)]
    assert histogram.sum == 102.0


def test_settlements_add_up():
    """Each count and the cost are sums, per model."""
    traffic = Traffic()
    traffic.of("a").add_bill(Usage(1, 2, 3, 4, 5), 10)
    traffic.of("a").add_bill(Usage(10, 20, 30, 40, 50), 100)
    assert traffic.of("a").usage == Usage(11, 22, 33, 44, 55)
    assert traffic.of("a").cost_micro_usd == 110
    assert traffic.of("b").usage == Usage()


def test_what_never_happened_is_not_observed():
    """A refused request has an outcome and a duration, and no time to a token."""
    traffic = Traffic()
    traffic.ended("a", "engine_overloaded", Timings(0.1, None, False, None, 0.2))
    model = traffic.of("a")
    observed = [h.cumulative()[-1][1] for h in (model.queue, *model.ttft.values(), model.tpot, model.total)]
    assert observed == [1, 0, 0, 0, 1]
    assert model.finishes == {"engine_overloaded": 1}


def test_targets_are_edges():
    """The shares within the targets for a first token and for the next ones can be read exactly."""
    assert {0.5, 0.7, 1.0} <= set(TTFT_S)
    assert {0.04, 0.05} <= set(TPOT_S) & set(ITL_S)


def test_responses_are_counted_by_route_and_status():
    """Each status of a route has a number; what met no route has a place of its own."""
    counts = ResponseCounts()
    for status, route in ((200, "/b"), (200, "/b"), (401, "/b"), (200, "/a")):
        counts.add(status, route)
    counts.add(503)
    assert counts.by_route() == {"/a": {"200": 1}, "/b": {"200": 2, "401": 1}, NO_ROUTE: {"503": 1}}
