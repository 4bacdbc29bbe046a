"""The time between two tokens of an answer (inter-token latency), sampled: each look at the clock costs."""

from __future__ import annotations

import random
from collections.abc import Callable

from app.core import Observes


class GapSampler:
    """Times one gap of every step of a choice, at a random place in it, and counts it for the whole step."""

    def __init__(
        self, gaps: Observes, clock_s: Callable[[], float], chance: Callable[[], float] = random.random
    ) -> None:
        """`chance` gives a number from 0 to below 1."""
        self._gaps, self._clock_s, self._chance = gaps, clock_s, chance
        self._step_tokens = self._step_ends = 0
        self._starts_at: int | None = None
        """With how many tokens the gap begins; None if it has."""
        self._timed_tokens, self._timed_s = 0, 0.0

    def begin(self, tokens: int, step_tokens: int) -> int:
        """Begin a step of so many tokens. Returns as `look`."""
        self._starts_at = tokens + int(self._chance() * step_tokens)
        self._step_tokens, self._step_ends = step_tokens, tokens + step_tokens
        self._timed_tokens = 0
        return self.look(tokens)

    def look(self, tokens: int) -> int:
        """Note that the choice has so many tokens; returns with how many the next call is due."""
        if self._starts_at is not None:
            if tokens < self._starts_at:
                return self._starts_at
            self._starts_at, self._timed_tokens, self._timed_s = None, tokens, self._clock_s()
        elif self._timed_tokens and tokens > self._timed_tokens:
            gap_s = (self._clock_s() - self._timed_s) / (tokens - self._timed_tokens)
            self._gaps.observe(gap_s, self._step_tokens)
            self._timed_tokens = 0
        return self._timed_tokens + 1 if self._timed_tokens else self._step_ends
