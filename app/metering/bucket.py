"""A token bucket: so many a second on average, and a burst at once."""

from __future__ import annotations


class Bucket:
    """A token bucket: its level and the time of that level, in seconds of one monotonic clock."""

    __slots__ = ("_at_s", "_burst", "_level", "_per_s")

    def __init__(self, per_s: float, burst: float, now_s: float) -> None:
        self._per_s = per_s
        self._burst = self._level = max(burst, 1.0)
        self._at_s = now_s

    def take(self, now_s: float) -> float:
        """Take one: 0, or the seconds until there will be one, and then nothing was taken."""
        self._level = min(self._level + (now_s - self._at_s) * self._per_s, self._burst)
        self._at_s = now_s
        if self._level < 1.0:
            return (1.0 - self._level) / self._per_s
        self._level -= 1.0
        return 0.0
