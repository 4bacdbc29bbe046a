"""How fast room comes free while requests wait for it."""

from __future__ import annotations

import math

MEMORY_S = 15.0
"""Time constant of the measurement, in seconds of waiting."""
MEASURED_S = 10.0
"""After how much waiting the measurement is one to remember."""
GUESS_WORTH_S = 1.0
"""Seconds of measuring that a guess is worth."""


class Throughput:
    """Tokens of reservations that end per second, while requests wait: idleness is not slowness."""

    def __init__(self, guess_tokens_per_s: float, now_s: float, worth_s: float = GUESS_WORTH_S) -> None:
        """`worth_s` is how many seconds of measuring the guess stands for."""
        self._tokens = guess_tokens_per_s * worth_s
        self._seconds = worth_s
        self.begun_s = self._at_s = now_s

    @property
    def tokens_per_s(self) -> float:
        """As measured lately; before anything was, a guess."""
        return max(self._tokens / self._seconds, 1.0)

    @property
    def measured(self) -> bool:
        """Whether requests have waited long enough for it to be more than a guess."""
        return self._seconds >= MEASURED_S

    def advance(self, now_s: float, *, waiting: bool) -> None:
        """Bring the measurement up to now; `waiting` is how it was since the last call."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        if waiting and passed_s > 0:
            kept = math.exp(-passed_s / MEMORY_S)
            self._tokens *= kept
            self._seconds = self._seconds * kept + passed_s

    def freed(self, tokens: int) -> None:
        """A reservation ended while requests waited."""
        self._tokens += tokens
