"""Responses by route and status, for the metrics: what was refused or not found is counted too."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

NO_ROUTE = "none"
"""The route of what names none: an unknown path, broken HTTP, a connection too many."""


class ResponseCounts:
    """Counts since the start of the process. The labels are bounded: templates of routes, not paths."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, int]] = Counter()

    def add(self, status: int, route: str = NO_ROUTE) -> None:
        """Count a response."""
        self._counts[route, status] += 1

    def by_route(self) -> Mapping[str, Mapping[str, int]]:
        """The number of responses by status, for each route."""
        routes: dict[str, dict[str, int]] = {}
        for (route, status), number in sorted(self._counts.items()):
            routes.setdefault(route, {})[str(status)] = number
        return routes
