"""Estimates of admission: the lengths of answers, and the tokens of KV memory that are freed per second.

Both are kept beside the store, so that a restarted server knows what it can promise. Lengths are estimated
anew while an answer grows, with their variance, because the KV memory that is set aside by them must not run
out (app.admission.budget). A key's limit is charged once before an answer begins (app.metering.limits), for
which a mean is enough: app.metering.estimate.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from app.admission.tuning import AdmissionTuning

FILE = "throughput.json"
_OLD_FILE = "pace.json"
"""The name in 0.1: read where there is no other, and replaced at the first write."""
_CLASSES = 22
"""Classes of length, by powers of two: up to 2**21 tokens."""


class LengthEstimate(NamedTuple):
    """Tokens that an answer will have when it ends; the variance is in tokens squared."""

    mean: int
    variance: int


class LengthHistogram:
    """Lengths of the answers of one key, or of a model, in classes of powers of two with their sums."""

    __slots__ = ("_max_weight", "_sums", "_weights", "total")

    def __init__(self, tuning: AdmissionTuning, classes: Sequence[Sequence[float]] = ()) -> None:
        """`classes` is what another histogram had. Raises TypeError, ValueError for anything else."""
        self._max_weight = tuning.answers_remembered
        self._weights = [0.0] * _CLASSES
        self._sums = [0.0] * _CLASSES
        for index, (weight, tokens) in enumerate(classes):
            if (
                index >= _CLASSES
                or not 0 <= weight <= 2 * self._max_weight
                or not 0 <= tokens <= weight * 2**index
            ):
                raise ValueError(f"class {index} cannot be")
            self._weights[index], self._sums[index] = float(weight), float(tokens)
        self.total = sum(self._weights)

    @property
    def classes(self) -> list[tuple[float, float]]:
        """The number of answers and the sum of their tokens, class by class."""
        return list(zip(self._weights, self._sums, strict=True))

    def add(self, tokens: int) -> None:
        """Count an answer that has ended by itself or at its limit."""
        if self.total >= self._max_weight:
            self._weights = [weight / 2 for weight in self._weights]
            self._sums = [tokens / 2 for tokens in self._sums]
            self.total /= 2
        index = min(tokens.bit_length(), _CLASSES - 1)
        self._weights[index] += 1
        self._sums[index] += tokens
        self.total += 1

    def longer_than(self, tokens: int) -> list[tuple[float, float]]:
        """Weight and mean length of each class of answers that became longer."""
        first = min(tokens.bit_length(), _CLASSES - 1)
        classes = zip(self._weights[first:], self._sums[first:], strict=True)
        return [(weight, total / weight) for weight, total in classes if weight and total > tokens * weight]


def expected(
    key: LengthHistogram, model: LengthHistogram, so_far: int, max_tokens: int, tuning: AdmissionTuning
) -> LengthEstimate:
    """The length in the end of a key's answer that has `so_far` tokens and may have `max_tokens`."""
    scale = min(tuning.model_answers / model.total, 1.0) if model.total else 0.0
    samples = key.longer_than(so_far)
    samples += [(weight * scale, tokens) for weight, tokens in model.longer_than(so_far)]
    samples += [(tuning.prior_weight, so_far + tokens) for tokens in tuning.prior_tokens]
    weights = total = squares = 0.0
    for weight, length in samples:
        tokens = min(length, max_tokens)
        weights += weight
        total += weight * tokens
        squares += weight * tokens * tokens
    mean = total / weights
    variance = max(squares / weights - mean * mean, 0.0)
    return LengthEstimate(max(min(math.ceil(mean), max_tokens), so_far), math.ceil(variance))


class Throughput:
    """KV tokens that ending requests free per second.

    It is measured only while requests wait, because an idle engine would look slow.
    """

    def __init__(
        self, guess_tokens_per_s: float, now_s: float, tuning: AdmissionTuning, worth_s: float = 1.0
    ) -> None:
        """The guess weighs as much as `worth_s` seconds of measurement."""
        self._memory_s, self._measured_s = tuning.throughput_memory_s, tuning.throughput_measured_s
        self._tokens = guess_tokens_per_s * worth_s
        self.measured_s = worth_s
        """Seconds of waiting that the value rests on; at most the time constant of the measurement."""
        self._at_s = now_s

    @property
    def is_measured(self) -> bool:
        """True if it rests on measuring, in this process or before it, and not on the guess alone."""
        return self.measured_s >= self._measured_s

    @property
    def tokens_per_s(self) -> float:
        """As measured lately; before anything was, the guess. At least 1."""
        return max(self._tokens / self.measured_s, 1.0)

    def advance(self, now_s: float, *, waiting: bool) -> None:
        """Bring the measurement up to now; `waiting` is how it was since the last call."""
        passed_s, self._at_s = now_s - self._at_s, now_s
        if waiting and passed_s > 0:
            kept = math.exp(-passed_s / self._memory_s)
            self._tokens *= kept
            self.measured_s = self.measured_s * kept + passed_s

    def freed(self, tokens: int) -> None:
        """An allocation ended while requests waited."""
        self._tokens += tokens


class ThroughputProfile:
    """A model's throughput and answer lengths when it was last full, over restarts of engine and process.

    Without a file it lasts as long as this object. A file that is lost or wrong is a first start.
    """

    def __init__(self, file: Path | None, tuning: AdmissionTuning) -> None:
        self._tuning = tuning
        self._file = file
        self._tokens_per_s: float | None = None
        self._lengths: LengthHistogram | None = None
        self._written_s = -math.inf

    def throughput(self, model: str, capacity_tokens: int, now_s: float) -> Throughput:
        """The throughput to begin with: the measured one, which outlasts a start, or else a guess.

        In the first seconds of a full node no allocation ends; these seconds say nothing about its speed.
        """
        tuning, stored = self._tuning, self._stored(model).get("tokens_per_s")
        if self._tokens_per_s is None and isinstance(stored, int | float) and 0 < stored < math.inf:
            self._tokens_per_s = float(stored)
        if self._tokens_per_s is not None:
            return Throughput(self._tokens_per_s, now_s, tuning, tuning.throughput_memory_s)
        guess = min(capacity_tokens / tuning.guess_pool_s, tuning.guess_tokens_per_s)
        return Throughput(guess, now_s, tuning)

    def lengths(self, model: str) -> LengthHistogram:
        """Lengths of the model's answers when it was last full; empty where they are not known."""
        if self._lengths is None:
            with contextlib.suppress(TypeError, ValueError):
                self._lengths = LengthHistogram(self._tuning, self._stored(model).get("answers") or ())
        return self._lengths or LengthHistogram(self._tuning)

    def observe(self, model: str, throughput: Throughput, lengths: LengthHistogram, now_s: float) -> None:
        """Remember the present figures, once they are measured."""
        if not throughput.is_measured:
            return
        self._tokens_per_s, self._lengths = throughput.tokens_per_s, lengths
        if self._file is not None and now_s - self._written_s >= self._tuning.profile_write_s:
            self._written_s = now_s
            answers = [(round(weight, 3), round(tokens, 3)) for weight, tokens in lengths.classes]
            stored = {"tokens_per_s": round(self._tokens_per_s), "answers": answers}
            self._write(self._file, self._read() | {model: stored})

    def _stored(self, model: str) -> dict[str, Any]:
        stored = self._read().get(model)
        return stored if isinstance(stored, dict) else {}

    def _read(self) -> dict[str, object]:
        if self._file is None:
            return {}
        file = self._file if self._file.exists() else self._file.with_name(_OLD_FILE)
        try:
            stored = json.loads(file.read_bytes())
        except (OSError, ValueError):
            return {}
        return stored if isinstance(stored, dict) else {}

    @staticmethod
    def _write(file: Path, profiles: dict[str, object]) -> None:
        """Whole or not at all; a full disk is not admission's concern."""
        temporary = file.with_suffix(".new")
        with contextlib.suppress(OSError):
            temporary.touch(mode=0o600)
            temporary.write_text(json.dumps(profiles) + "\n", "utf-8")
            temporary.replace(file)
            file.with_name(_OLD_FILE).unlink(missing_ok=True)
