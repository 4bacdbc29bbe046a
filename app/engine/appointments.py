"""Who was sent away until when: a refusal's `Retry-After` is an appointment, not a guess.

A refused request has its place at the end of its key's line, and is told when that will be at the
door. Room is kept for those about to come; one that comes when it was told is let in before those
that were never here. Those that do not come lose it a little later, and how many do come is learned.
"""

from __future__ import annotations

import math
from collections import deque

GRACE_S = 10
"""How late a request may be for its appointment."""
_DECAY = 0.97


class Shows:
    """Which part of those that were told to come back does."""

    __slots__ = ("_came", "_made")

    def __init__(self) -> None:
        self._came = self._made = 4.0  # it is believed of them until they are seen not to

    @property
    def part(self) -> float:
        """0 to 1."""
        return self._came / self._made

    def count(self, came: bool) -> None:  # noqa: FBT001  # the one thing it is told
        """One came, or did not."""
        self._came = self._came * _DECAY + came
        self._made = self._made * _DECAY + 1


class Appointments:
    """One key's. Times are seconds of the same clock; a request is known by its fingerprint."""

    __slots__ = ("_by_fingerprint", "_by_second", "_due_tokens", "num", "tokens")

    def __init__(self) -> None:
        self.num = 0
        self.tokens = 0
        self._by_second: dict[int, dict[int, deque[int]]] = {}
        self._by_fingerprint: dict[int, deque[int]] = {}
        self._due_tokens: dict[int, int] = {}

    def make(self, fingerprint: int, at_s: float, tokens: int) -> None:
        """Expect a request."""
        second = math.floor(at_s)
        self._by_second.setdefault(second, {}).setdefault(fingerprint, deque()).append(tokens)
        self._by_fingerprint.setdefault(fingerprint, deque()).append(second)
        self._due_tokens[second] = self._due_tokens.get(second, 0) + tokens
        self.num += 1
        self.tokens += tokens

    def keep(self, fingerprint: int, now_s: float) -> bool:
        """Whether a request comes to an appointment, which it then no longer has; not if it comes early."""
        seconds = self._by_fingerprint.get(fingerprint)
        if not seconds or min(seconds) > now_s:
            return False
        self._drop(fingerprint, min(seconds))
        return True

    def miss(self, now_s: float) -> int:
        """Forget those who have not come; how many."""
        late = [second for second in self._by_second if second + GRACE_S < now_s]
        missed = [
            (fp, second) for second in late for fp, all_ in self._by_second[second].items() for _ in all_
        ]
        for fingerprint, second in missed:
            self._drop(fingerprint, second)
        return len(missed)

    def due_tokens(self, until_s: float) -> int:
        """Tokens of those expected by then."""
        return sum(tokens for second, tokens in self._due_tokens.items() if second <= until_s)

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
