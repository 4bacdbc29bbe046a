"""Chats of many sizes, as people send them: for loads whose answers need not be compared."""

from __future__ import annotations

import json
import math
import random
from dataclasses import dataclass

from scripts.benchmarks.prompts import TEXT

_WORDS = TEXT.split()
_SYSTEM = "You answer the customers of shop {key} about their orders, in one paragraph, without asking back."


@dataclass(frozen=True, slots=True)
class Shape:
    """What chats look like. Ranges are ends of a log-uniform distribution: most are short, a few long."""

    words: tuple[int, int] = (20, 300)
    tokens: tuple[int, int] = (16, 256)
    exact: float = 0.5
    """Part of them that have exactly so many tokens (`ignore_eos`); the others end where the model ends."""
    max_tokens: int = 512
    """`max_tokens` of the others."""


class Chats:
    """Bodies of one shape, no two alike, all of a key with one system prompt."""

    def __init__(self, model: str, shape: Shape, seed: int) -> None:
        self._model = model
        self._shape = shape
        self._rng = random.Random(seed)  # noqa: S311  # reproducible, not secret
        self._number = 0

    def next(self, key: int) -> bytes:
        """The next body, for a key."""
        rng, shape = self._rng, self._shape
        self._number += 1
        exact = rng.random() < shape.exact
        words = " ".join(rng.choices(_WORDS, k=_between(rng, shape.words)))
        body = {
            "model": self._model,
            "messages": [
                {"role": "system", "content": _SYSTEM.format(key=key)},
                {"role": "user", "content": f"{self._number}: {words}"},
            ],
            "max_tokens": _between(rng, shape.tokens) if exact else shape.max_tokens,
            "temperature": 0,
            "ignore_eos": exact,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        return json.dumps(body).encode()


def _between(rng: random.Random, ends: tuple[int, int]) -> int:
    low, high = ends
    return round(low * math.pow(high / low, rng.random()))
