"""A circuit breaker: a server that keeps failing is left alone until a probe finds it well.

| state | requests | leaves it by |
|---|---|---|
| closed | pass | `threshold` failures in a row, or `trip` → open |
| open | refused | a probe at `next_probe_s` that succeeds → closed |

Probes are the owner's: no caller's request is spent on finding out. Pure: the time is passed in.
"""

from __future__ import annotations

from app.engine.restart import Backoff


class Breaker:
    """One server's. Times are seconds of a monotonic clock."""

    def __init__(
        self, *, threshold: int = 3, first_pause_s: float = 1.0, longest_pause_s: float = 30.0
    ) -> None:
        self._threshold = threshold
        self._backoff = Backoff(first_pause_s, longest_pause_s)
        self._failures = 0
        self.is_open = False
        self.next_probe_s = 0.0

    def succeeded(self) -> None:
        """The server did what it was asked. An open breaker stays so: only a probe closes it."""
        self._failures = 0

    def close(self) -> None:
        """A probe found the server well."""
        self._failures = 0
        self._backoff.reset()
        self.is_open = False

    def failed(self, now_s: float) -> None:
        """A request, a poll or a probe failed."""
        self._failures += 1
        if self.is_open:
            self.next_probe_s = now_s + self._backoff.next_s()
        elif self._failures >= self._threshold:
            self.trip(now_s)

    def trip(self, now_s: float, *, probe_now: bool = False) -> None:
        """Open at once; the first probe is due after the pause, or now."""
        if not self.is_open:
            self.is_open = True
            self.next_probe_s = now_s if probe_now else now_s + self._backoff.next_s()
