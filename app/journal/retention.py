"""The time for which an unstored answer is kept for a client that returns."""

from __future__ import annotations

import time
from collections.abc import Callable

from app.store import events
from app.store.database import Database

MAX_OUTAGE_S = 3600.0
"""Seconds for which an answer is kept beyond its retention where requests are not taken for long enough.

Two starts of the engine that take as long as they may (`engine_start_s`). Clients send a request again for
minutes, and unstored text must go.
"""
SWEEP_S = 5.0
"""Seconds between two sweeps at least."""


class Retention:
    """The retention of what is not stored: so many seconds after its end, in which requests are taken.

    A client with an Idempotency-Key is refused while the engine is away or loads. If its answer were
    forgotten meanwhile, the same request would be generated and billed again. A server that takes no
    requests, or is lost again and again, forgets all the same, MAX_OUTAGE_S later.
    """

    def __init__(
        self, database: Database, retention_s: float, is_serving: Callable[[], bool] = lambda: True
    ) -> None:
        """`is_serving` is whether requests are taken now."""
        self._database = database
        self._retention_s = retention_s
        self._is_serving = is_serving
        self._serving_since_s: float | None = None
        self._swept_at_s = float("-inf")

    async def sweep(self) -> None:
        """Delete the events whose retention has ended. Does nothing within SWEEP_S of the last sweep.

        Raises StorageUnavailable.
        """
        now_s = time.monotonic()
        if now_s - self._swept_at_s < SWEEP_S:
            return
        self._swept_at_s = now_s
        until_us = self.until_us(now_s, time.time_ns() // 1000)
        while await self._database.read(lambda c: events.has_unstored(c, until_us)):
            await self._database.write(lambda c: events.forget_unstored(c, until_us))
            self._database.text_deleted.set()

    def until_us(self, now_s: float, today_us: int) -> int:
        """The time of day before which an answer must have ended to be forgotten now.

        `now_s` is the monotonic time, `today_us` the time of day.
        """
        if not self._is_serving():
            self._serving_since_s = None
        elif self._serving_since_s is None:
            self._serving_since_s = now_s
        kept_s = self._retention_s
        if self._serving_since_s is None or now_s - self._serving_since_s < self._retention_s:
            kept_s += MAX_OUTAGE_S
        return today_us - int(kept_s * 1e6)
