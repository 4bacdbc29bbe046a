"""The engine's KV pool as reservations: prompts in flight, shared prefixes once, and what answers will add.

    committed = distinct prompt tokens + mean growth + SAFETY * deviation of all growth together

Answers are independent, so the deviation of many together is small against their mean: the margin
is wide for one long answer and narrow for a thousand. It is never more than all answers' limits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from app.admission.output_length import Growth
from app.admission.prefix_tree import Held, PrefixTree

SAFETY = 2.5
"""Standard deviations of margin."""
HEADROOM = 0.02
"""Part of the pool that is never reserved: pages that are not full, and what was not foreseen."""
_SAMPLES = 6


class Claim:
    """What one request takes of the pool."""

    __slots__ = ("generated", "held", "ids", "mean", "most", "n", "space", "variance")

    def __init__(self, ids: Sequence[int], space: str | None, n: int, most: int, growth: Growth) -> None:
        self.ids: Sequence[int] = ids if type(ids) is list else list(ids)
        self.space = space
        self.n = n
        self.most = n * most
        self.generated = 0
        self.held: Held | None = None
        self.mean = self.variance = 0
        self.expect(growth)

    def expect(self, growth: Growth) -> None:
        """Take on a new estimate of a choice's length. Choices are alike: their deviations add up."""
        self.mean = min(self.n * growth.mean, self.most)
        self.variance = self.n * self.n * growth.variance


class Pool:
    """Who holds how much of the KV memory. All in tokens."""

    def __init__(self, capacity_tokens: int) -> None:
        self.capacity_tokens = capacity_tokens
        self.num_claims = 0
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

    def shared_tokens(self, claim: Claim) -> int:
        """Tokens of the prompt that others in flight hold already."""
        return 0 if claim.space is None else self._tree.shared_tokens(claim.ids, claim.space)

    def fits(self, claim: Claim, spare_tokens: int = 0) -> bool:
        """Whether there is room, `spare_tokens` left over; into an empty pool everything fits."""
        if not self.num_claims:
            return True
        growth = self._growth(claim.mean, claim.variance, claim.most)
        room = self.limit_tokens - spare_tokens - self.prompt_tokens - growth
        if room >= len(claim.ids) or room < 0:
            return room >= 0
        return room >= len(claim.ids) - self.shared_tokens(claim)

    def take(self, claim: Claim) -> None:
        """Reserve."""
        self.num_claims += 1
        if claim.space is None:
            self._private_tokens += len(claim.ids)
        else:
            claim.held = self._tree.hold(claim.ids, claim.space)
        self._count(claim, 1)

    def correct(self, claim: Claim, growth: Growth, generated: int) -> None:
        """Take on what is known now of a request in flight."""
        self._count(claim, -1)
        claim.generated = generated
        claim.expect(growth)
        self._count(claim, 1)

    def give_back(self, claim: Claim) -> None:
        """End a reservation."""
        self.num_claims -= 1
        self._count(claim, -1)
        if claim.held is None:
            self._private_tokens -= len(claim.ids)
        else:
            self._tree.let_go(claim.held)
            claim.held = None

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

    def _count(self, claim: Claim, sign: int) -> None:
        self._mean += sign * claim.mean
        self._variance += sign * claim.variance
        self._most += sign * claim.most
        self.used_tokens += sign * claim.generated

    def _growth(self, mean: int, variance: int, most: int) -> int:
        deviation = SAFETY * math.sqrt(self._variance + variance)
        return min(self._mean + mean + math.ceil(deviation), self._most + most)
