"""Reads of the store by owner: a rate of requests, one at a time, alternating with other owners.

Lists, searches, views, exports, reports and stored answers cost more than a refusal does, and no limit of a
key counts them. The reads of a chat request are not counted here: the request has been charged.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from app.concurrency.fair_gate import FairGate
from app.core import Key
from app.errors import RateLimited
from app.metering.limits import Limiter
from app.metering.rates import Bucket
from app.store.database import READERS

BURST_S = 10.0
"""Seconds of the rate that may arrive at once: a page that loads, a script that begins."""
MAX_READERS = READERS // 2
"""Readers of the store for these; the others are for chat, whose history waits for no export."""
MAX_WAITING = 64
"""Requests of a caller that may wait for their slot; browsers send 6 at once."""
MAX_WAITING_TOTAL = 1_024


class Reads:
    """The reads of all callers, by owner."""

    def __init__(
        self, limiter: Limiter, max_per_s: float, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        """0 requests a second means no limit."""
        self._limiter = limiter
        self._max_per_s = max_per_s
        self._clock_s = clock_s
        self._buckets: dict[str, Bucket] = {}
        self._gate = FairGate(
            MAX_READERS, "reads", max_per_owner=MAX_WAITING, max_total=MAX_WAITING_TOTAL, one_each=True
        )

    def charge(self, owner: str, key: Key | None) -> None:
        """Charge one request. Raises RateLimited."""
        if not self._max_per_s:
            return
        now_s = self._clock_s()
        if owner not in self._buckets:
            self._buckets[owner] = Bucket(self._max_per_s, self._max_per_s * BURST_S, now_s)
        wait_s = self._buckets[owner].take(now_s)
        if wait_s:
            if key is not None:
                self._limiter.count_refusal(key, "reads")
            retry_s = math.ceil(wait_s)
            raise RateLimited(
                f"More than {self._max_per_s:g} requests a second (max_reads_per_s) to lists, views, exports,"
                f" usage, models and stored answers. Try again in {retry_s} s.",
                retry_after_s=retry_s,
            )

    def slot(self, owner: str) -> AbstractAsyncContextManager[None]:
        """Wait for the caller's slot to read. Raises RateLimited, Overloaded."""
        return self._gate.place(owner)
