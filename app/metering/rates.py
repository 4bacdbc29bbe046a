"""Two ways to hold a rate: a sliding window for the limits of a key, a token bucket for what costs little.

A charge counts in its window from the moment it is made until `WINDOW_S` later; what is charged never
exceeds the limit in any 60 s. What turned out to be more than its charge is debt: it is charged as soon as
the window has room, and nothing else is before it.
"""

from __future__ import annotations

import math
from collections import deque
from itertools import chain

WINDOW_S = 60.0


class Charge:
    """An amount, and when it was charged."""

    __slots__ = ("amount", "at_s", "live")

    def __init__(self, at_s: float, amount: int) -> None:
        self.at_s = at_s
        self.amount = amount
        self.live = True

    def expire(self) -> None:
        self.live = False

    def reduce(self, amount: int) -> None:
        self.amount -= amount


class Window:
    """One limit's window. `advance` before anything is read or charged."""

    __slots__ = ("_charges", "debt", "used")

    def __init__(self) -> None:
        self._charges: deque[Charge] = deque()
        self.used = 0
        self.debt = 0

    def advance(self, now_s: float, limit: int) -> None:
        """Forget what is older than the window, and pay debt, each part at the moment it had room."""
        while self._charges and self._charges[0].at_s + WINDOW_S <= now_s:
            charge = self._charges.popleft()
            charge.expire()
            self.used -= charge.amount
            self._pay(charge.at_s + WINDOW_S, limit)
        self._pay(now_s, limit)

    def _pay(self, at_s: float, limit: int) -> None:
        paid = min(self.debt, limit - self.used)
        if paid > 0:
            self.debt -= paid
            self.charge(at_s, paid)

    def room(self, limit: int) -> int:
        """The amount that can be charged now."""
        return max(limit - self.used - self.debt, 0)

    def charge(self, at_s: float, amount: int) -> Charge:
        """Charge an amount for which there is room."""
        charge = Charge(at_s, amount)
        self._charges.append(charge)
        self.used += amount
        return charge

    def add_debt(self, amount: int) -> None:
        """Add an amount for which there is no room to the debt."""
        self.debt += amount

    def give_back(self, charge: Charge, amount: int) -> None:
        """Take a part of a charge back; one that is older than the window changes nothing."""
        charge.reduce(amount)
        if charge.live:
            self.used -= amount

    def wait_s(self, now_s: float, amount: int, limit: int) -> float:
        """Seconds until an amount will fit if nothing else is charged; infinite when it never will."""
        if amount > limit:
            return math.inf
        used, debt, at_s = self.used, self.debt, now_s
        paid: list[tuple[float, int]] = []
        charges = ((charge.at_s, charge.amount) for charge in self._charges)
        for charged_at_s, charged in chain(charges, paid):
            if used + debt + amount <= limit:
                break
            at_s = charged_at_s + WINDOW_S
            used -= charged
            if (payment := min(debt, limit - used)) > 0:
                debt -= payment
                used += payment
                paid.append((at_s, payment))
        return at_s - now_s

    def reset_s(self, now_s: float, limit: int) -> float:
        """Seconds until nothing is charged or owed any more."""
        rounds = -(-self.debt // limit)
        last_s = self._charges[-1].at_s + WINDOW_S if self._charges else now_s
        return max(last_s - now_s, 0.0) + rounds * WINDOW_S


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
