"""The memory for the bodies of all requests in flight, and each caller's share of it.

A caller may hold as much as is free after its own bytes are counted (dynamic thresholds, Choudhury and Hahne
1998). Of 300 MB one caller gets 150, two get 100 each, and as much as each has is left for the next.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import AbstractAsyncContextManager

from app.concurrency.fair_gate import FairGate
from app.errors import Unavailable

WAIT_S = 2.0
"""Seconds that a body waits for memory. Unless the server is full, memory is free within milliseconds."""

MAX_WAITING = 256
"""Bodies that may wait at the same time; a further body is refused at once."""

MAX_UNPARSED = 256
"""Large bodies of one caller that may wait to be parsed."""
MAX_UNPARSED_TOTAL = 1_024


class BodyBudget:
    """Counts the bytes of bodies, by caller."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.held_bytes = 0
        self._by_owner: Counter[str] = Counter()
        self._waiting: set[asyncio.Future[None]] = set()
        self._parsing = FairGate(
            1, "large bodies", max_per_owner=MAX_UNPARSED, max_total=MAX_UNPARSED_TOTAL, one_each=True
        )

    def parse_slot(self, owner: str) -> AbstractAsyncContextManager[None]:
        """Wait for the owner's slot to have a large body parsed. Raises RateLimited, Overloaded.

        One at a time: a parser holds the interpreter's lock, and with several the loop would wait for all
        of them whenever it has something to do.
        """
        return self._parsing.place(owner)

    def fits(self, owner: str, size_bytes: int, own_bytes: int = 0) -> bool:
        """True where `owner` may hold that much more now, for a body that has `own_bytes` already."""
        if self.held_bytes == own_bytes:  # a body that is larger than half of it must pass alone
            return True
        free_bytes = self.budget_bytes - self.held_bytes - size_bytes
        return self._by_owner[owner] + size_bytes <= free_bytes

    async def take(self, owner: str, size_bytes: int, own_bytes: int = 0) -> None:
        """Wait for `size_bytes` of memory, and count them as the owner's. Raises Unavailable."""
        if not self.fits(owner, size_bytes, own_bytes):
            await self._wait(owner, size_bytes, own_bytes)
        self.held_bytes += size_bytes
        self._by_owner[owner] += size_bytes

    def give_back(self, owner: str, size_bytes: int) -> None:
        """Give the bytes back, and wake the waiting bodies."""
        self.held_bytes -= size_bytes
        self._by_owner[owner] -= size_bytes
        if not self._by_owner[owner]:
            del self._by_owner[owner]
        for waiter in self._waiting:
            if not waiter.done():
                waiter.set_result(None)

    async def _wait(self, owner: str, size_bytes: int, own_bytes: int) -> None:
        if len(self._waiting) >= MAX_WAITING:
            raise _full()
        try:
            async with asyncio.timeout(WAIT_S):
                while not self.fits(owner, size_bytes, own_bytes):
                    await self._freed()
        except TimeoutError:
            raise _full() from None

    async def _freed(self) -> None:
        freed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.add(freed)
        try:
            await freed
        finally:
            self._waiting.discard(freed)


class BodyLease:
    """The bytes of the budget that one request holds."""

    __slots__ = ("_budget", "_owner", "_size_bytes")

    def __init__(self, budget: BodyBudget) -> None:
        self._budget = budget
        self._owner = ""
        self._size_bytes = 0

    async def grow_to(self, owner: str, size_bytes: int) -> None:
        """Raise the request's memory to `size_bytes` in all. Raises Unavailable."""
        self._owner = owner
        if size_bytes > self._size_bytes:
            await self._budget.take(owner, size_bytes - self._size_bytes, self._size_bytes)
            self._size_bytes = size_bytes

    def parse_slot(self) -> AbstractAsyncContextManager[None]:
        """The owner's slot to have a large body parsed; see `BodyBudget.parse_slot`."""
        return self._budget.parse_slot(self._owner)

    def release(self) -> None:
        """Give all memory back. A second call does nothing."""
        if self._size_bytes:
            size_bytes, self._size_bytes = self._size_bytes, 0
            self._budget.give_back(self._owner, size_bytes)


def _full() -> Unavailable:
    return Unavailable(
        "The memory for request bodies, or this caller's share of it, is full. Send fewer large requests at"
        " once, then send this one again.",
        code="too_many_bodies",
        retry_after_s=2,
    )
