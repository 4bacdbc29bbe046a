"""Lines for what is done for few requests at once: each caller has a line of its own.

A line is a lock, which is handed on in the order of arrival. A request that holds its caller's lock and then
waits for a semaphore waits beside no other request of that caller: so callers take turns at the semaphore,
however many requests each of them has.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from app.errors import Overloaded, RateLimited

RETRY_S = 1


class Lines:
    """Bounded lines, by caller."""

    def __init__(self, what: str, max_per_caller: int, max_total: int) -> None:
        """`what` names the requests that stand in them, for refusals."""
        self._what = what
        self._max_per_caller = max_per_caller
        self._max_total = max_total
        self._locks: dict[str, asyncio.Lock] = {}
        self._lengths: dict[str, int] = {}
        self._total = 0

    @contextmanager
    def enter(self, caller: str) -> Iterator[asyncio.Lock]:
        """A place in the caller's line, whose lock is its turn. Raises RateLimited, Overloaded."""
        length = self._lengths.get(caller, 0)
        if length >= self._max_per_caller:
            raise RateLimited(
                f"{length} {self._what} of this owner wait already, and no more may;"
                " send them one after the other.",
                retry_after_s=RETRY_S,
            )
        if self._total >= self._max_total:
            raise Overloaded(
                f"{self._total} {self._what} wait on this server, and no more may; try again.",
                retry_after_s=RETRY_S,
            )
        self._lengths[caller] = length + 1
        self._total += 1
        try:
            yield self._locks.setdefault(caller, asyncio.Lock())
        finally:
            self._total -= 1
            self._lengths[caller] -= 1
            if not self._lengths[caller]:
                del self._lengths[caller], self._locks[caller]
