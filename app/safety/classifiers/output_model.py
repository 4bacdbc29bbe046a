"""The model of answers: weights of hashed n-grams, added up while the answer grows.

    text → ASCII look, lower case, signs as spaces → words, pairs of words, stems
         → weight of each, less a drift: the sum, which starts again where it would fall below 0 → logit → p

So the sum is that of the most harmful stretch that ends here, of any length: a harmless beginning hides
nothing (Page, Biometrika 41, 1954). A repeated n-gram counts half. A token costs its own n-grams, about 3 µs,
independent of the text before it. Reading in other chunks gives the same n-grams. The model scores text and
decides nothing.
"""

from __future__ import annotations

import math
import zlib
from array import array
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.safety.text.normalize import folded

BITS = 18
"""The harm weights are 2**BITS, places in them the lower bits of an n-gram's CRC-32."""
STEP_BYTES = 12
"""Characters read at once, about 3 tokens. Longer text is read in steps, so that no stretch is missed."""
REPEAT_WEIGHT = 0.5
"""Weight of an n-gram that occurred before in the answer."""
PRIOR = 1.0
"""The part of a prompt of harm 1 in the logit of its answer."""

_MAX_WORD_CHARS = 64
_REMEMBERED = 4096  # n-grams of an answer that are known again; then it forgets them all
_STEM = 5
_STEM_SALT = 7
_PLACES = (1 << BITS) - 1
_SPACE = 32
_exp = math.exp


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
    """A text in the form that is scored: bytes of words, and spaces."""
    if text.isascii():
        return text.encode().translate(_TABLE)
    return folded(text).encode("utf-8", "replace").translate(_TABLE)


class Grams:
    """The n-grams of a text that is read in chunks, as places in the table.

    A word counts once the byte after it was read; one of more than 64 bytes is cut.
    """

    __slots__ = ("_last", "_word")

    def __init__(self) -> None:
        self._word = b""
        self._last = 0

    def read(self, data: bytes) -> list[int]:
        """The places of the n-grams that these bytes of `plain_bytes` complete."""
        text = self._word + data
        words = text.split()
        self._word = words.pop() if words and text[-1] != _SPACE and len(words[-1]) < _MAX_WORD_CHARS else b""
        places: list[int] = []
        crc = zlib.crc32
        for word in words:
            pair, last = crc(word, self._last), crc(word)
            self._last = last
            places += (last & _PLACES, pair & _PLACES, crc(word[:_STEM], _STEM_SALT) & _PLACES)
        return places


class Answer:
    """One growing text, and the sum of its most harmful stretch."""

    __slots__ = ("_grams", "_known", "_model", "_now", "_prior", "_sum", "logit", "p")

    def __init__(self, model: OutputModel, prior: float) -> None:
        self._model = model
        self._prior = prior
        self._grams = Grams()
        self._known: set[int] = set()
        self._sum = 0.0
        self._now = 0.0
        self.logit = -math.inf
        self.p = 0.0
        """The harm score as of now, calibrated."""

    def feed(self, text: str) -> float:
        """The harm score, 0 to 1, with `text` at the end; of several steps the highest of two in a row."""
        data = plain_bytes(text)
        if len(data) <= STEP_BYTES:
            self._step(data)
            self.p = self._now
            return self.p
        previous = highest = self._step(data[:STEP_BYTES])
        for at in range(STEP_BYTES, len(data), STEP_BYTES):
            now = self._step(data[at : at + STEP_BYTES])
            highest = min(now, previous) if at == STEP_BYTES else max(highest, min(now, previous))
            previous = now
        self.p = _sigmoid(highest)
        return self.p

    def _step(self, data: bytes) -> float:
        """Read a few tokens; the logit then."""
        places = self._grams.read(data)
        if not places:  # within a word
            return self.logit
        model, seen = self._model, self._known
        weight, total = model.weight, max(self._sum, 0.0) - model.drift * len(places)
        for place in places:
            if place in seen:
                total += REPEAT_WEIGHT * weight[place]
            else:
                seen.add(place)
                total += weight[place]
        if len(seen) > _REMEMBERED:
            seen.clear()
        self._sum = total
        logit = self.logit = self._prior + (model.slope * total + model.intercept)
        self._now = 1.0 / (1.0 + _exp(-logit)) if logit > -60.0 else 0.0
        return logit


class OutputModel:
    """The weights. Immutable; any thread may score answers with it, one thread for each answer.

    `harm` has a weight for each place. `drift` is taken off for each n-gram; `line` is slope and intercept of
    the logit.
    """

    def __init__(
        self,
        harm: NDArray[np.float16],
        *,
        drift: float,
        line: tuple[float, float],
        review_at: float = 1.0,
    ) -> None:
        self.weight = array("f", harm.astype(np.float32).tobytes())
        """The weight at each place."""
        self.drift = drift
        self.review_at = review_at
        """The score from which an answer is to be reviewed."""
        self.slope, self.intercept = line

    @classmethod
    def load(cls, path: Path) -> OutputModel:
        """The model of a file. Raises OSError, KeyError or ValueError if it is none."""
        with np.load(path, allow_pickle=False) as arrays:
            harm, drift = arrays["harm"], float(arrays["drift"])
            slope, intercept = (float(value) for value in arrays["line"])
            review_at = float(arrays["suspect_at"])
        if harm.shape != (1 << BITS,):
            raise ValueError(f"{path.name} has a table of another size")
        return cls(harm, drift=drift, line=(slope, intercept), review_at=review_at)

    def start(self, prompt_harm: float) -> Answer:
        """A new answer, to a prompt of this harm."""
        return Answer(self, PRIOR * prompt_harm)


def _sigmoid(logit: float) -> float:
    return 1.0 / (1.0 + math.exp(-logit)) if logit > -60.0 else 0.0
