"""How long answers become, from how long they have been: per key, and of the model for keys without a past.

LengthHistogram are counted in classes of powers of two, with their mean, so that the estimate can be
made for an answer that has begun already: of those that became longer than it is now.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
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


FILE = "pace.json"
GUESS_S = 8.0
"""How long a pool full of requests is taken to run, of which nothing is known."""
GUESS_TOKENS_PER_S = 4096.0
"""More is not expected then: a promise that is not kept is worse than one for later."""
KEEP_S = 60.0


class ThroughputProfile:
    """One model's, in tokens of reservations that end per second. Without a file it lasts as long as this."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._tokens_per_s: float | None = None
        self._lengths: LengthHistogram | None = None
        self._kept_s = -math.inf

    def guess(self, model: str, capacity_tokens: int) -> float:
        """What to begin by: as it was when the model was last full."""
        if self._tokens_per_s is None:
            pace = self._known(model).get("tokens_per_s")
            if isinstance(pace, int | float) and math.isfinite(pace) and pace > 0:
                self._tokens_per_s = float(pace)
        return self._tokens_per_s or min(capacity_tokens / GUESS_S, GUESS_TOKENS_PER_S)

    @property
    def worth_s(self) -> float:
        """How many seconds of measuring what `guess` said is worth: what was measured outlasts a start.

        None ends in the first seconds of a full node, which is no measure of its pace.
        """
        return GUESS_WORTH_S if self._tokens_per_s is None else MEMORY_S

    def lengths(self, model: str) -> LengthHistogram:
        """How long the model's answers were when it was last full; none where that is not known."""
        if self._lengths is None:
            classes = self._known(model).get("answers")
            with contextlib.suppress(TypeError, ValueError):
                self._lengths = LengthHistogram.of(classes)  # type: ignore[arg-type]  # it is checked there
        return self._lengths or LengthHistogram()

    def observe(self, model: str, throughput: Throughput, lengths: LengthHistogram, now_s: float) -> None:
        """Remember how things are, once that is measured."""
        if not throughput.measured:
            return
        self._tokens_per_s, self._lengths = throughput.tokens_per_s, lengths
        if self._file is not None and now_s - self._kept_s >= KEEP_S:
            self._kept_s = now_s
            answers = [(round(weight, 3), round(tokens, 3)) for weight, tokens in lengths.classes]
            known = {"tokens_per_s": round(self._tokens_per_s), "answers": answers}
            self._write(self._file, self._read() | {model: known})

    def _known(self, model: str) -> dict[str, object]:
        known = self._read().get(model)
        return known if isinstance(known, dict) else {}

    def _read(self) -> dict[str, object]:
        try:
            found = json.loads(self._file.read_bytes()) if self._file is not None else None
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}

    @staticmethod
    def _write(file: Path, paces: dict[str, object]) -> None:
        """Whole or not at all; that a disk is full is others' concern."""
        beside = file.with_suffix(".new")
        with contextlib.suppress(OSError):
            beside.touch(mode=0o600)
            beside.write_text(json.dumps(paces) + "\n", "utf-8")
            beside.replace(file)
