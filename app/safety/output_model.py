"""The model of answers: hashed n-grams of a text that grows, added up as it comes.

    text → ASCII look, lower case, signs as spaces → words, pairs of words, stems
         → sum of weights / sqrt(count)  of all so far, and of the last WINDOW_BYTES → logit → p

A token costs its own n-grams, about 3 µs, whatever came before. Reading in other pieces gives the same
n-grams; only where the window begins depends on them. The category comes of the window's n-grams, and
only when asked for. Letters' n-grams told nothing more on sources left out, and cost twice as much.
Knows text, not what becomes of it.
"""

from __future__ import annotations

import math
import zlib
from array import array
from collections import deque
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.safety.categories import CATEGORIES
from app.safety.normalize import folded
from app.safety.verdict import Scores

BITS = 18
"""The harm weights are 2**BITS, places in them the lower bits of an n-gram's CRC-32."""
CATEGORY_BITS = 14
WINDOW_BYTES = 288
"""About 64 tokens."""
LEAST_GRAMS = 100
"""Fewer n-grams are divided by as if they were so many: a beginning says little."""
STEP_BYTES = 36
"""About 8 tokens: more at once is read in steps, so that no window is passed over."""
PRIOR = 0.5
"""What a prompt that is certainly harmful adds to the logit of its answer."""

_LONGEST_WORD = 64
_STEM = 5
_STEM_SALT = 7
_PLACES = (1 << BITS) - 1
_SPACE = 32


def _table() -> bytes:
    """Letters and digits in lower case, bytes of other scripts as they are, everything else a space."""
    kept = bytearray(b" " * 128) + bytes(range(128, 256))
    for byte in b"abcdefghijklmnopqrstuvwxyz0123456789'":
        kept[byte] = byte
    for byte in b"ABCDEFGHIJKLMNOPQRSTUVWXYZ":
        kept[byte] = byte + 32
    return bytes(kept)


_TABLE = _table()


def plain_bytes(text: str) -> bytes:
    """A text as it is read: bytes of words, and spaces."""
    return (text if text.isascii() else folded(text)).encode("utf-8", "replace").translate(_TABLE)


class Grams:
    """The n-grams of a text that comes in pieces, as places in the table.

    A word counts once the byte after it has come; one of more than 64 bytes is cut.
    """

    __slots__ = ("_last", "_word")

    def __init__(self) -> None:
        self._word = b""
        self._last = 0

    def read(self, data: bytes) -> list[int]:
        """The places of the n-grams that these bytes of `plain_bytes` complete."""
        text = self._word + data
        words = text.split()
        self._word = words.pop() if words and text[-1] != _SPACE and len(words[-1]) < _LONGEST_WORD else b""
        places: list[int] = []
        crc = zlib.crc32
        for word in words:
            pair = crc(word, self._last)
            self._last = crc(word)
            places += (self._last & _PLACES, pair & _PLACES, crc(word[:_STEM], _STEM_SALT) & _PLACES)
        return places


class Answer:
    """One text as it is heard: its sums, and what its window began with."""

    __slots__ = ("_bytes", "_count", "_grams", "_marks", "_model", "_prior", "_sum", "logit", "p")

    def __init__(self, model: OutputModel, prior: float) -> None:
        self._model = model
        self._prior = prior
        self._grams = Grams()
        self._sum = 0.0
        self._count = 0
        self._bytes = 0
        self._marks: deque[tuple[int, float, int, list[int]]] = deque([(0, 0.0, 0, [])])
        self.logit = -math.inf
        self.p = 0.0
        """The harm score as of now, calibrated."""

    def feed(self, text: str) -> float:
        """The harm score, 0 to 1, now that `text` has come: of several steps the highest."""
        data = plain_bytes(text)
        if len(data) <= STEP_BYTES:
            self.p = _sigmoid(self._step(data))
        else:
            steps = range(0, len(data), STEP_BYTES)
            self.p = _sigmoid(max(self._step(data[at : at + STEP_BYTES]) for at in steps))
        return self.p

    def scores(self) -> Scores:
        """The scores by category as of now; the likeliest has the harm score."""
        likely = self._model.likely([place for mark in islice(self._marks, 1, None) for place in mark[3]])
        return {category: self.p * share for category, share in zip(CATEGORIES, likely, strict=True)}

    def _step(self, data: bytes) -> float:
        """Read a few tokens; the logit then."""
        model = self._model
        places = self._grams.read(data)
        if places:
            self._sum += sum(map(model.weight, places))
            self._count += len(places)
            self._bytes += len(data)
            marks = self._marks
            marks.append((self._bytes, self._sum, self._count, places))
            least = self._bytes - WINDOW_BYTES
            while marks[1][0] <= least:
                marks.popleft()
            _, sum_before, count_before, _ = marks[0]
            self.logit = self._prior + model.logit(
                self._sum, self._count, self._sum - sum_before, self._count - count_before
            )
        return self.logit


class OutputModel:
    """The weights. Immutable; any thread may hear answers by it, one thread an answer.

    `harm` has a weight for each place, `categories` a row for each category over the lower bits of the
    same places. `whole` and `window` are slope and intercept of the two logits.
    """

    def __init__(
        self,
        harm: NDArray[np.float16],
        categories: NDArray[np.int8],
        category_scale: float,
        offsets: NDArray[np.float32],
        whole: tuple[float, float],
        window: tuple[float, float],
    ) -> None:
        self._harm = array("f", harm.astype(np.float32).tobytes())
        self.weight = self._harm.__getitem__
        """The weight at a place."""
        self._categories = categories
        self._category_scale = category_scale
        self._offsets = offsets
        self._whole = whole
        self._window = window

    @classmethod
    def load(cls, path: Path) -> OutputModel:
        """The model of a file. Raises OSError, KeyError or ValueError if it is none."""
        with np.load(path, allow_pickle=False) as arrays:
            harm, categories, offsets = arrays["harm"], arrays["categories"], arrays["offsets"]
            scale, whole, window = float(arrays["category_scale"]), arrays["whole"], arrays["window"]
        if harm.shape != (1 << BITS,) or categories.shape != (len(CATEGORIES), 1 << CATEGORY_BITS):
            raise ValueError(f"{path.name} has tables of another size")
        return cls(harm, categories, scale, offsets, _pair(whole), _pair(window))

    def listen(self, prior: Scores) -> Answer:
        """A new answer, to a prompt of these scores."""
        return Answer(self, PRIOR * max(prior.values(), default=0.0))

    def logit(self, total: float, count: int, recent: float, recent_count: int) -> float:
        """The higher of the logits of the whole text and of its window."""
        whole = total / math.sqrt(max(count, LEAST_GRAMS)) * self._whole[0] + self._whole[1]
        window = recent / math.sqrt(max(recent_count, LEAST_GRAMS)) * self._window[0] + self._window[1]
        return max(whole, window)

    def likely(self, places: list[int]) -> list[float]:
        """How likely each category is beside the likeliest, which has 1, by the n-grams at these places."""
        at = np.array(places, np.intp) & ((1 << CATEGORY_BITS) - 1)
        sums = self._categories[:, at].sum(axis=1, dtype=np.int64) * self._category_scale
        logits = sums / math.sqrt(max(len(places), 1)) + self._offsets
        return [float(share) for share in np.exp(logits - logits.max())]


def _pair(values: NDArray[np.float64]) -> tuple[float, float]:
    slope, intercept = (float(value) for value in values)
    return slope, intercept


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit)) if logit > -60.0 else 0.0
