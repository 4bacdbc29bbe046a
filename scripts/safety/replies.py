"""Answers as the stream screen hears them: token by token, whole, cut short, or spliced after others."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.safety.output_model import LEAST_GRAMS, Grams, plain_bytes
from scripts.safety.rows import Row

WINDOW_TOKENS = 64
_MOST_CHARS = 6_000
_TOKEN = re.compile(r"\s?\w{1,6}|\s?[^\w\s]{1,3}|\s+")
"""About 4.5 characters, as tokenizers of large vocabularies have it; which one does not matter here."""


@dataclass(frozen=True, slots=True)
class Reply:
    """A row's text read: `places` in the order they come, of which token k completes up to `ends[k]`."""

    row: Row
    places: NDArray[np.int32]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def between(self, start: int, end: int) -> NDArray[np.int32]:
        """The places that the tokens from `start` to `end` complete."""
        first = self.ends[start - 1] if start else 0
        return self.places[first : self.ends[end - 1]]


class Sums(NamedTuple):
    """After each token: sum of weights over the root of their count, of the whole and of its window."""

    whole: NDArray[np.float64]
    window: NDArray[np.float64]


def tokens(text: str) -> list[str]:
    """A text in pieces like a model's tokens."""
    return _TOKEN.findall(text)


def read(row: Row) -> Reply:
    """A row's text, read token by token."""
    grams = Grams()
    places: list[int] = []
    ends: list[int] = []
    for token in tokens(row.text[:_MOST_CHARS]):
        places += grams.read(plain_bytes(token))
        ends.append(len(places))
    return Reply(row, np.array(places, np.int32), np.array(ends, np.int64))


def sums(weights: NDArray[np.float32], parts: Sequence[tuple[Reply, int]]) -> Sums:
    """What a model hears in replies that follow one another, of each its first so many tokens."""
    totals: list[NDArray[np.float64]] = []
    counts: list[NDArray[np.int64]] = []
    total, count = 0.0, 0
    for reply, length in parts:
        said = np.cumsum(weights[reply.between(0, length)], dtype=np.float64)
        ends = reply.ends[:length]
        totals.append(total + np.concatenate([[0.0], said])[ends])
        counts.append(count + ends)
        total, count = totals[-1][-1], counts[-1][-1]
    heard, number = np.concatenate(totals), np.concatenate(counts)
    before = np.concatenate([np.zeros(WINDOW_TOKENS), heard])[: len(heard)]
    number_before = np.concatenate([np.zeros(WINDOW_TOKENS, np.int64), number])[: len(number)]
    return Sums(_scaled(heard, number), _scaled(heard - before, number - number_before))


def _scaled(total: NDArray[np.float64], count: NDArray[np.int64]) -> NDArray[np.float64]:
    result: NDArray[np.float64] = total / np.sqrt(np.maximum(count, LEAST_GRAMS))
    return result


def cuts(reply: Reply, rng: random.Random, most: int) -> list[tuple[int, int]]:
    """Stretches of tokens to train on: the whole, then beginnings and windows of random length."""
    length = len(reply)
    found = [(0, length)]
    for _ in range(min(most, length // 12) - 1):
        if length > WINDOW_TOKENS and rng.random() < 0.5:
            end = rng.randrange(WINDOW_TOKENS, length + 1)
            found.append((end - WINDOW_TOKENS, end))
        else:
            found.append((0, int(12 * (length / 12) ** rng.random())))
    return found


def twice(scores: NDArray[np.float64]) -> float:
    """The highest score that was reached at two tokens in a row."""
    return float(scores[0] if len(scores) < 2 else np.minimum(scores[1:], scores[:-1]).max())


def halted_at(scores: NDArray[np.float64], threshold: float) -> int | None:
    """The token at which two in a row had reached the threshold; None if none had."""
    hits = scores >= threshold
    both = np.flatnonzero(hits[1:] & hits[:-1])
    return int(both[0]) + 1 if len(both) else None
