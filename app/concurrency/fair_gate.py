"""The gate at which owners alternate: places at something slow.

    acquire ──▶ a place free? ── yes ────────────────────────────────▶ place ──▶ release
                    │ no                                                 ▲
                    ▼                                                    │
            [requests by owner] ── the next owner's lowest rank, then the oldest

The owner that had a place last is the last to have one again: one owner's many requests delay that owner and
not the others. Admission has a queue of its own (app.admission.queue): there a request takes tokens of an
engine, a key has a weight and a tier, and the order is not all: a request must fit. Used by one event loop.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from app.errors import Overloaded, RateLimited

RETRY_S = 1

Rank = tuple[int, int]
_Waiting = tuple[Rank, int, asyncio.Future[None]]


class FairGate:
    """A limited number of places. With `one_each` an owner has one place at a time."""

    def __init__(
        self,
        places: int,
        what: str = "requests",
        *,
        max_per_owner: int = 0,
        max_total: int = 0,
        one_each: bool = False,
    ) -> None:
        """At most `max_per_owner` and `max_total` may `enter`; 0 is no bound. Refusals name them `what`."""
        self._free = places
        self._what, self._max_per_owner, self._max_total = what, max_per_owner, max_total
        self._one_each = one_each
        self._holders: set[str] = set()
        """The owners that have their one place."""
        self._entered: Counter[str] = Counter()
        self._queues: dict[str, list[_Waiting]] = {}
        """The requests that wait, a heap for each owner; owners in the order in which they are served."""
        self._numbers = itertools.count()

    @property
    def has_waiting(self) -> bool:
        """True if a request waits for a place."""
        return bool(self._queues)

    @contextmanager
    def enter(self, owner: str) -> Iterator[None]:
        """Count a request that waits or has a place. Raises RateLimited, Overloaded."""
        num_own, num_all = self._entered[owner], self._entered.total()
        if self._max_per_owner and num_own >= self._max_per_owner:
            raise RateLimited(
                f"{num_own} {self._what} of this owner are waiting, the most allowed;"
                " send them one after the other.",
                retry_after_s=RETRY_S,
            )
        if self._max_total and num_all >= self._max_total:
            raise Overloaded(
                f"{num_all} {self._what} are waiting on this server, the most allowed; try again.",
                retry_after_s=RETRY_S,
            )
        self._entered[owner] += 1
        try:
            yield
        finally:
            self._entered[owner] -= 1
            if not self._entered[owner]:
                del self._entered[owner]

    @asynccontextmanager
    async def place(self, owner: str) -> AsyncIterator[None]:
        """Wait for a place, and take it. Raises as `enter`."""
        with self.enter(owner):
            await self.acquire(owner)
            try:
                yield
            finally:
                self.release(owner)

    async def acquire(self, owner: str, rank: Rank = (0, 0)) -> None:
        """Wait for a place. Raises what `refuse_waiting` is given."""
        if self._free and owner not in self._holders:
            self._take(owner)
            return
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._queues.setdefault(owner, []), (rank, next(self._numbers), future))
        try:
            await future
        except BaseException:
            if future.done() and not future.cancelled() and future.exception() is None:
                self.release(owner)  # who waited left just when the place was theirs
            raise

    def release(self, owner: str) -> None:
        """Give a place back; the owner that is next has it."""
        self._free += 1
        if owner in self._queues:  # it had a place last: behind the others
            self._queues[owner] = self._queues.pop(owner)
        self._holders.discard(owner)
        self._hand_on()

    def reset_places(self, places: int) -> int:
        """Take all places back and offer so many; returns how many of them are taken now."""
        self._free = places
        self._hand_on()
        return places - self._free

    def refuse_waiting(self, error: type[Exception]) -> None:
        """Raise `error()` in all that wait."""
        for queue in self._queues.values():
            for *_, future in queue:
                if not future.done():
                    future.set_exception(error())
        self._queues.clear()

    def _take(self, owner: str) -> None:
        self._free -= 1
        if self._one_each:
            self._holders.add(owner)

    def _hand_on(self) -> None:
        while self._free:
            owner = next((owner for owner in self._queues if owner not in self._holders), None)
            if owner is None:
                return
            queue = self._queues.pop(owner)
            while queue:
                future = heapq.heappop(queue)[-1]
                if not future.done():  # its client may have left
                    self._take(owner)
                    future.set_result(None)
                    break
            if queue:
                self._queues[owner] = queue  # behind the others
