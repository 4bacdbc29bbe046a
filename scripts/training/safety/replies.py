"""Answers as the stream screen hears them: token by token, whole, cut short, or spliced after others."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.safety.classifiers.output_model import REPEAT_WEIGHT, Grams, plain_bytes
from scripts.training.safety.rows import Row

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


def sums(
    weights: NDArray[np.float32], drift: float, parts: Sequence[tuple[Reply, int]]
) -> NDArray[np.float64]:
    """After each token the sum that a model hears in replies that follow one another.

    Of each reply its first so many tokens.
    """
    places = np.concatenate([reply.between(0, length) for reply, length in parts])
    ends: list[NDArray[np.int64]] = []
    read = 0
    for reply, length in parts:
        ends.append(reply.ends[:length] + read)
        read = int(ends[-1][-1])
    scores = weights[places].astype(np.float64) * np.where(_again(places), REPEAT_WEIGHT, 1.0) - drift
    total = np.concatenate([[0.0], np.cumsum(scores)])[np.concatenate(ends)]
    total_before = np.concatenate([[0.0], total[:-1]])
    result: NDArray[np.float64] = total - np.minimum.accumulate(total_before)
    return result


def _again(places: NDArray[np.int32]) -> NDArray[np.bool_]:
    """Which n-grams have been there before."""
    result = np.ones(len(places), np.bool_)
    result[np.unique(places, return_index=True)[1]] = False
    return result


def cuts(reply: Reply, rng: random.Random, max_cuts: int) -> list[tuple[int, int]]:
    """Stretches of tokens to train on: the whole, then beginnings and windows of random length."""
    length = len(reply)
    spans = [(0, length)]
    for _ in range(min(max_cuts, length // 12) - 1):
        if length > WINDOW_TOKENS and rng.random() < 0.5:
            end = rng.randrange(WINDOW_TOKENS, length + 1)
            spans.append((end - WINDOW_TOKENS, end))
        else:
            spans.append((0, int(12 * (length / 12) ** rng.random())))
    return spans


def twice(scores: NDArray[np.float64]) -> float:
    """The highest score that was reached at two tokens in a row."""
    return float(scores[0] if len(scores) < 2 else np.minimum(scores[1:], scores[:-1]).max())


def halted_at(scores: NDArray[np.float64], threshold: float) -> int | None:
    """The token at which two in a row had reached the threshold; None if none had."""
    hits = scores >= threshold
    both = np.flatnonzero(hits[1:] & hits[:-1])
    return int(both[0]) + 1 if len(both) else None
