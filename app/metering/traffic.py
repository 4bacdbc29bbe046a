"""Counts since the start of the process, for the metrics: requests and tokens by model, responses.

Plain numbers, changed once a request and read at a scrape; nothing here is stored or billed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.core import Usage

QUEUE_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
LOOP_LAG_S = (0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.7, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
TPOT_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0)
ITL_S = (*TPOT_S, 2.5, 5.0)
TOTAL_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
NO_ROUTE = "none"
"""The route of what names none: an unknown path, broken HTTP, a connection too many."""


class Timings(NamedTuple):
    """One request's seconds; None for what never happened."""

    queue_s: float | None
    """Received until admitted."""
    ttft_s: float | None
    """Received until the first token."""
    prefix_hit: bool
    """True if the prefix cache had half of the prompt, or more."""
    tpot_s: float | None
    """(last token - first token) / (tokens - 1), of the longest choice."""
    total_s: float
    """Received until ended."""


class Histogram:
    """A cumulative histogram: the observations at or below each bound, and their sum."""

    __slots__ = ("_bounds", "_counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float | None, times: int = 1) -> None:
        """Count a value; None is none."""
        if value is not None:
            self._counts[bisect_left(self._bounds, value)] += times
            self.sum += times * value

    def cumulative(self) -> list[tuple[float, int]]:
        """Each bound with the observations up to it; the last bound is infinite."""
        total, rows = 0, []
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            rows.append((bound, total))
        return rows


class ModelTraffic:
    """One model's requests."""

    def __init__(self) -> None:
        self.finishes: Counter[str] = Counter()
        self.usage = Usage()
        """Tokens of the committed settlements."""
        self.cost_micro_usd = 0
        self.queue = Histogram(QUEUE_S)
        self.ttft = {"hit": Histogram(TTFT_S), "miss": Histogram(TTFT_S)}
        """By whether the prefix cache had half of the prompt."""
        self.tpot = Histogram(TPOT_S)
        self.total = Histogram(TOTAL_S)

    def add_bill(self, usage: Usage, cost_micro_usd: int) -> None:
        """Add the bill of a request whose settlement is committed."""
        self.usage = Usage(*map(sum, zip(self.usage, usage, strict=True)))
        self.cost_micro_usd += cost_micro_usd


class Traffic:
    """All models' requests."""

    def __init__(self) -> None:
        self.models: defaultdict[str, ModelTraffic] = defaultdict(ModelTraffic)

    def of(self, model: str) -> ModelTraffic:
        """A model's numbers, all zero when it is new."""
        return self.models[model]

    def ended(self, model: str, finish: str, timings: Timings) -> None:
        """Count a request at its end, of any kind."""
        traffic = self.of(model)
        traffic.finishes[finish] += 1
        traffic.queue.observe(timings.queue_s)
        traffic.ttft["hit" if timings.prefix_hit else "miss"].observe(timings.ttft_s)
        traffic.tpot.observe(timings.tpot_s)
        traffic.total.observe(timings.total_s)


class ResponseCounts:
    """Responses by route and status, refused ones too. The labels are templates of routes, not paths."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def add(self, status: int, route: str = NO_ROUTE) -> None:
        self._counts[route, status] += 1

    def by_route(self) -> Mapping[str, Mapping[str, int]]:
        """The number of responses by status, for each route."""
        routes: dict[str, dict[str, int]] = {}
        for (route, status), number in sorted(self._counts.items()):
            routes.setdefault(route, {})[str(status)] = number
        return routes
