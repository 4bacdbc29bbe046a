"""A bound on the requests that begin in one tick of the event loop: a thousand at once do not block it.

A request that begins takes one to two milliseconds before it waits for anything, a long one more. A thousand
that arrive together would take them all in one tick: no token and no `/healthz` would go out for seconds.
"""

from __future__ import annotations

import asyncio
import time

from app.concurrency.fair_gate import FairGate

MAX_STARTS_PER_TICK, MIN_STARTS_PER_TICK = 8, 4
"""Requests that begin in one tick. If fewer began than the minimum, new requests would starve beside a
thousand streams."""
LONG_TICK_S = 0.04
"""Seconds of a tick from which fewer begin in the next ones: twice what eight requests take."""


class LoopGate:
    """Lets a few requests begin in each tick of the loop; owners alternate."""

    def __init__(self) -> None:
        self._max_starts = MAX_STARTS_PER_TICK
        self._gate = FairGate(self._max_starts)
        self._ticked_s: float | None = None
        """Monotonic seconds of the last tick; None if none is due, because no request began after it."""

    async def take(self, owner: str) -> None:
        """Begin at once, or in one of the next ticks."""
        if self._ticked_s is None:
            self._ticked_s = time.monotonic()
            loop = asyncio.get_running_loop()
            loop.call_soon(self._tick, loop)
        await self._gate.acquire(owner)

    def _tick(self, loop: asyncio.AbstractEventLoop) -> None:
        assert self._ticked_s is not None
        now_s = time.monotonic()
        if self._gate.has_waiting and now_s - self._ticked_s > LONG_TICK_S:
            self._max_starts = max(self._max_starts // 2, MIN_STARTS_PER_TICK)
        else:
            self._max_starts = min(self._max_starts + 1, MAX_STARTS_PER_TICK)
        begun = self._gate.reset_places(self._max_starts)
        self._ticked_s = now_s if begun else None
        if begun:
            loop.call_soon(self._tick, loop)
