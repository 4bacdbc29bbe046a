"""The engine's KV pool as reservations: prompts in flight, shared prefixes once, and what answers will add.

    committed = distinct prompt tokens + mean growth + SAFETY * deviation of all growth together

Answers are independent, so the deviation of many together is small against their mean: the margin
is wide for one long answer and narrow for a thousand. It is never more than all answers' limits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from app.admission.output_length import LengthEstimate
from app.admission.prefix_tree import Held, PrefixTree

SAFETY = 2.5
"""Standard deviations of margin."""
HEADROOM = 0.02
"""Part of the pool that is never reserved: pages that are not full, and what was not foreseen."""
_SAMPLES = 6


class KVReservation:
    """What one request takes of the pool."""

    __slots__ = ("generated", "held", "ids", "mean", "most", "n", "space", "variance")

    def __init__(
        self, ids: Sequence[int], space: str | None, n: int, most: int, growth: LengthEstimate
    ) -> None:
        self.ids: Sequence[int] = ids if type(ids) is list else list(ids)
        self.space = space
        self.n = n
        self.most = n * most
        self.generated = 0
        self.held: Held | None = None
        self.mean = self.variance = 0
        self.expect(growth)

    def expect(self, growth: LengthEstimate) -> None:
        """Take on a new estimate of a choice's length. Choices are alike: their deviations add up."""
        self.mean = min(self.n * growth.mean, self.most)
        self.variance = self.n * self.n * growth.variance


class KVBudget:
    """Who holds how much of the KV memory. All in tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.num_reservations = 0
        self.used_tokens = 0
        """Generated tokens of requests in flight, as last seen."""
        self._tree = PrefixTree()
        self._private_tokens = 0
        self._mean = self._variance = self._most = 0
        self._drifts: deque[int] = deque(maxlen=_SAMPLES)
        self.drift_tokens = 0
        """What the engine uses beyond what is known here."""

    @property
    def prompt_tokens(self) -> int:
        """Distinct prompt tokens of the requests in flight."""
        return self._tree.tokens + self._private_tokens

    @property
    def committed_tokens(self) -> int:
        """What is reserved now."""
        return self.prompt_tokens + self._growth(0, 0, 0)

    @property
    def limit_tokens(self) -> int:
        """What may be reserved."""
        return int(self.capacity_tokens * (1 - HEADROOM)) - self.drift_tokens

    def shared_tokens(self, reservation: KVReservation) -> int:
        """Tokens of the prompt that others in flight hold already."""
        return (
            0 if reservation.space is None else self._tree.shared_tokens(reservation.ids, reservation.space)
        )

    def fits(self, reservation: KVReservation, spare_tokens: int = 0) -> bool:
        """Whether there is room, `spare_tokens` left over; into an empty pool everything fits."""
        if not self.num_reservations:
            return True
        growth = self._growth(reservation.mean, reservation.variance, reservation.most)
        room = self.limit_tokens - spare_tokens - self.prompt_tokens - growth
        if room >= len(reservation.ids) or room < 0:
            return room >= 0
        return room >= len(reservation.ids) - self.shared_tokens(reservation)

    def take(self, reservation: KVReservation) -> None:
        """Reserve."""
        self.num_reservations += 1
        if reservation.space is None:
            self._private_tokens += len(reservation.ids)
        else:
            reservation.held = self._tree.hold(reservation.ids, reservation.space)
        self._count(reservation, 1)

    def correct(self, reservation: KVReservation, growth: LengthEstimate, generated: int) -> None:
        """Take on what is known now of a request in flight."""
        self._count(reservation, -1)
        reservation.generated = generated
        reservation.expect(growth)
        self._count(reservation, 1)

    def give_back(self, reservation: KVReservation) -> None:
        """End a reservation."""
        self.num_reservations -= 1
        self._count(reservation, -1)
        if reservation.held is None:
            self._private_tokens -= len(reservation.ids)
        else:
            self._tree.let_go(reservation.held)
            reservation.held = None

    def observe(self, used_tokens: int) -> None:
        """Compare with what the engine says that it uses.

        What it says is some steps old, and has requests that ended since: the least of the last
        comparisons counts.
        """
        self._drifts.append(max(used_tokens - self.prompt_tokens - self.used_tokens, 0))
        least = min(self._drifts) if len(self._drifts) == _SAMPLES else 0
        self.drift_tokens = min(least, self.capacity_tokens // 2)

    def forget_drift(self) -> None:
        """Begin to compare anew, with an engine that has just started."""
        self._drifts.clear()
        self.drift_tokens = 0

    def _count(self, reservation: KVReservation, sign: int) -> None:
        self._mean += sign * reservation.mean
        self._variance += sign * reservation.variance
        self._most += sign * reservation.most
        self.used_tokens += sign * reservation.generated

    def _growth(self, mean: int, variance: int, most: int) -> int:
        deviation = SAFETY * math.sqrt(self._variance + variance)
        return min(self._mean + mean + math.ceil(deviation), self._most + most)
