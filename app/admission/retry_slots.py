"""Retry slots: a refusal's `Retry-After` is a time at which room is kept, and not a guess.

A refused request gets a slot at the end of its key's line, and the seconds until the line has moved on
so far. A request that comes back at its time goes before requests that come for the first time. A slot
that nobody uses ends a little later, and the share of slots that are used is measured.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

GRACE_S = 10
"""How late a request may be for its appointment."""
LEAST_PART = 0.5
"""Of those told to come back, at least so many are expected, whatever was seen: all may come this time."""
_DECAY = 0.995


class ReturnRate:
    """Which part of those that were told to come back does."""

    __slots__ = ("_came", "_made")

    def __init__(self) -> None:
        self._came = self._made = 20.0  # it is believed of them until they are seen not to

    @property
    def part(self) -> float:
        """`LEAST_PART` to 1."""
        return max(self._came / self._made, LEAST_PART)

    def count(self, came: int, missed: int) -> None:
        """So many came, and so many did not, of those told one time; told of it when that is over."""
        kept = math.pow(_DECAY, came + missed)
        self._came = self._came * kept + came
        self._made = self._made * kept + came + missed


class RetrySlots:
    """One key's. Times are seconds of the same clock; a request is known by its fingerprint."""

    __slots__ = ("_by_fingerprint", "_by_second", "_came", "_due_tokens", "num", "tokens")

    def __init__(self) -> None:
        self.num = 0
        self.tokens = 0
        self._by_second: dict[int, dict[int, deque[int]]] = {}
        self._by_fingerprint: dict[int, deque[int]] = {}
        self._due_tokens: dict[int, int] = {}
        self._came: dict[int, int] = {}

    @property
    def open(self) -> bool:
        """Whether there are any whose time is not quite over."""
        return bool(self.num or self._came)

    def make(self, fingerprint: int, at_s: float, tokens: int) -> None:
        """Expect a request."""
        second = math.floor(at_s)
        self._by_second.setdefault(second, {}).setdefault(fingerprint, deque()).append(tokens)
        self._by_fingerprint.setdefault(fingerprint, deque()).append(second)
        self._due_tokens[second] = self._due_tokens.get(second, 0) + tokens
        self.num += 1
        self.tokens += tokens

    def has(self, fingerprint: int, now_s: float) -> bool:
        """Whether a request may keep one now."""
        seconds = self._by_fingerprint.get(fingerprint)
        return bool(seconds and min(seconds) <= now_s)

    def later(self, fingerprint: int, now_s: float) -> int | None:
        """For when a request is expected that has come too early."""
        return min((at for at in self._by_fingerprint.get(fingerprint, ()) if at > now_s), default=None)

    def keep(self, fingerprint: int, now_s: float) -> bool:
        """Whether a request comes to an appointment, which it then no longer has; not if it comes early."""
        seconds = self._by_fingerprint.get(fingerprint)
        if not seconds or min(seconds) > now_s:
            return False
        second = min(seconds)
        self._drop(fingerprint, second)
        self._came[second] = self._came.get(second, 0) + 1
        return True

    def close(self, now_s: float) -> tuple[int, int]:
        """Forget those whose time is over: how many of them came, and how many did not."""
        late = [second for second in self._by_second if second + GRACE_S < now_s]
        missed = [
            (fp, second) for second in late for fp, all_ in self._by_second[second].items() for _ in all_
        ]
        for fingerprint, second in missed:
            self._drop(fingerprint, second)
        over = [second for second in self._came if second + GRACE_S < now_s]
        return sum(self._came.pop(second) for second in over), len(missed)

    def due_at(self, second: int) -> int:
        """Tokens of those told that second."""
        return self._due_tokens.get(second, 0)

    def due_within(self, now_s: float, ahead_s: Sequence[int]) -> list[int]:
        """Tokens of those expected by some times from now, in their order."""
        if not self.num:
            return [0] * len(ahead_s)
        found, tokens, second = [], 0, math.floor(now_s) - GRACE_S - 1
        for ahead in ahead_s:
            until = math.floor(now_s) + ahead
            for at in range(second, until + 1):
                tokens += self._due_tokens.get(at, 0)
            second = until + 1
            found.append(tokens)
        return found

    def _drop(self, fingerprint: int, second: int) -> None:
        self._by_fingerprint[fingerprint].remove(second)
        if not self._by_fingerprint[fingerprint]:
            del self._by_fingerprint[fingerprint]
        of = self._by_second[second]
        tokens = of[fingerprint].popleft()
        self.num -= 1
        self.tokens -= tokens
        self._due_tokens[second] -= tokens
        if not of[fingerprint]:
            del of[fingerprint]
        if not of:
            del self._by_second[second]
            del self._due_tokens[second]
