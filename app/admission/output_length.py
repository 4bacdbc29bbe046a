"""How long answers become, from how long they have been: per key, and of the model for keys without a past.

LengthHistogram are counted in classes of powers of two, with their mean, so that the estimate can be
made for an answer that has begun already: of those that became longer than it is now.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

CLASSES = 22
REMEMBERED = 200.0
"""Observations after which the oldest half counts half."""
_MODEL_WEIGHT = 4.0
"""Observations that the model's own past is worth beside the key's."""
_STALE = 16
"""Answers of other keys after which an estimate is made anew."""
_LIMITS = 64
"""Estimates kept per key, one for each `max_tokens`."""
_PRIOR: Sequence[float] = (64.0, 256.0, 1024.0)
_PRIOR_WEIGHT = 0.5
"""Observations that each of the above is worth: tokens still to come where nothing is known."""


class LengthEstimate(NamedTuple):
    """Tokens that an answer will have when it ends."""

    mean: int
    variance: int
    """In tokens squared."""


class LengthHistogram:
    """The lengths of one key's answers, or of all of a model's."""

    __slots__ = ("_sums", "_weights", "added", "first", "total")

    def __init__(self) -> None:
        self._weights = [0.0] * CLASSES
        self._sums = [0.0] * CLASSES
        self.total = 0.0
        self.added = 0
        self.first: dict[int, tuple[int, LengthEstimate]] = {}
        """What answers with a limit are expected to be, and how many the model had had when that was said."""

    @classmethod
    def of(cls, classes: Sequence[Sequence[float]]) -> LengthHistogram:
        """As `classes` was. Raises ValueError where it is none of these."""
        lengths = cls()
        for index, (weight, total) in enumerate(classes):
            if index >= CLASSES or not (0 <= weight <= 2 * REMEMBERED and 0 <= total <= weight * 2**index):
                raise ValueError(f"class {index} cannot be")
            lengths._weights[index], lengths._sums[index] = float(weight), float(total)
        lengths.total = sum(lengths._weights)
        return lengths

    @property
    def classes(self) -> list[tuple[float, float]]:
        """By class, how many there were, and their tokens: enough to begin with again."""
        return list(zip(self._weights, self._sums, strict=True))

    def add(self, tokens: int) -> None:
        """An answer of that length has ended by itself, or at its limit."""
        if self.total >= REMEMBERED:
            self._weights = [weight / 2 for weight in self._weights]
            self._sums = [total / 2 for total in self._sums]
            self.total /= 2
        self.added += 1
        self.first.clear()
        index = min(tokens.bit_length(), CLASSES - 1)
        self._weights[index] += 1
        self._sums[index] += tokens
        self.total += 1

    def longer_than(self, tokens: int) -> list[tuple[float, float]]:
        """Weight and mean length of each class of answers that became longer."""
        first = min(tokens.bit_length(), CLASSES - 1)
        found = []
        for index in range(first, CLASSES):
            weight = self._weights[index]
            if weight and self._sums[index] > tokens * weight:
                found.append((weight, self._sums[index] / weight))
        return found


def expected_at_first(
    key: LengthHistogram, model: LengthHistogram, body: Mapping[str, Any], most: int
) -> LengthEstimate:
    """`expected` for an answer that has not begun; the last estimate stands until there is something new."""
    if body.get("ignore_eos"):
        return LengthEstimate(most, 0)
    least = min(body.get("min_tokens") or 0, most)
    if least:
        return expected(key, model, least, most)
    known = key.first.get(most)
    if known is not None and model.added - known[0] < _STALE:
        return known[1]
    if len(key.first) >= _LIMITS:
        key.first.clear()
    growth = expected(key, model, 0, most)
    key.first[most] = (model.added, growth)
    return growth


def expected(key: LengthHistogram, model: LengthHistogram, so_far: int, most: int) -> LengthEstimate:
    """What an answer of a key, `so_far` tokens long and at most `most`, will have in the end."""
    weights = squares = total = 0.0
    scale = _MODEL_WEIGHT / model.total if model.total > _MODEL_WEIGHT else 1.0
    for lengths, factor in ((key, 1.0), (model, scale)):
        for one, length in lengths.longer_than(so_far):
            weight, tokens = one * factor, min(length, most)
            weights += weight
            total += weight * tokens
            squares += weight * tokens * tokens
    for more in _PRIOR:
        tokens = min(so_far + more, most)
        weights += _PRIOR_WEIGHT
        total += _PRIOR_WEIGHT * tokens
        squares += _PRIOR_WEIGHT * tokens * tokens
    mean = total / weights
    variance = max(squares / weights - mean * mean, 0.0)
    return LengthEstimate(max(min(math.ceil(mean), most), so_far), math.ceil(variance))
