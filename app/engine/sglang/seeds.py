"""The seeds of a request's choices, for SGLang's deterministic mode."""

from __future__ import annotations

import secrets

SEEDS = 2**64
"""SGLang keeps a batch's seeds in an int64 tensor; a number that it does not hold ends the scheduler."""


def seed_of_choice(seed: int | None, index: int) -> int:
    """The seed of one choice: the request's and the choice's index, modulo the range of int64.

    Choices of a seeded request differ from one another, reproducibly. Those of an unseeded one are random:
    SGLang would take 42 for every request without a seed.
    """
    if seed is None:
        return secrets.randbits(31)
    return (seed + index + SEEDS // 2) % SEEDS - SEEDS // 2
