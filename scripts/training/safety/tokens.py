"""Texts as the encoder's token ids, and as batches of about one length."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from app.safety.classifiers.encoder import CLS, SEP
from app.safety.text.normalize import normalize
from scripts.training.safety.obfuscate import leet, typos

PAD = 0
"""The mark of BERT's vocabulary that stands behind a shorter text."""
TRAINED_TOKENS = 80
"""Longer texts are trained on in parts: attention and memory are paid by length."""
_HEAD = 0.5  # how often the part is the beginning
_TYPOS, _LEET, _CUT = 0.14, 0.05, 0.06
_WHOLE, _LEAST_HEARD = 0.5, 12


class Wordpieces:
    """The tokenizer of the published weights."""

    def __init__(self, folder: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def ids(self, text: str) -> list[int]:
        """The pieces of a normalized text, without marks."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids


def disguised(text: str, rng: random.Random) -> str:
    """The normalized text, in some draws with typos, in a few in leet or without its first words."""
    draw = rng.random()
    if draw < _TYPOS:
        return normalize(typos(text, rng))
    if draw < _TYPOS + _LEET:
        return normalize(leet(text, rng))
    if draw < _TYPOS + _LEET + _CUT:
        words = normalize(text).split(" ")
        return " ".join(words[rng.randrange(1, 3) :]) if len(words) > 8 else " ".join(words)
    return normalize(text)


def shortened(ids: list[int], rng: random.Random, *, harmful: bool) -> list[int]:
    """At most TRAINED_TOKENS of the ids: the beginning, the end, or of a benign text any part."""
    room = TRAINED_TOKENS - 2
    if len(ids) <= room:
        return ids
    if rng.random() < _HEAD:
        return ids[:room]
    start = len(ids) - room if harmful else rng.randrange(len(ids) - room + 1)
    return ids[start : start + room]


def heard_part(ids: list[int], rng: random.Random) -> list[int]:
    """What an examination of an answer may read: up to TRAINED_TOKENS of the ids that end anywhere.

    Half of the parts end where the answer does.
    """
    room = TRAINED_TOKENS - 2
    end = len(ids) if rng.random() < _WHOLE else rng.randrange(min(_LEAST_HEARD, len(ids)), len(ids) + 1)
    return ids[max(0, end - room) : end]


def padded(pieces: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    """(batch, tokens) ids between their marks, and 0/1 attention."""
    longest = max(len(ids) for ids in pieces) + 2
    ids = np.full((len(pieces), longest), PAD, np.int64)
    attention = np.zeros((len(pieces), longest), np.float32)
    for row, piece in enumerate(pieces):
        ids[row, : len(piece) + 2] = [CLS, *piece, SEP]
        attention[row, : len(piece) + 2] = 1.0
    return torch.from_numpy(ids), torch.from_numpy(attention)


def batches(lengths: NDArray[np.intp], size: int, rng: random.Random) -> Iterator[NDArray[np.intp]]:
    """The places 0, 1, … in batches of like length: sorted within stretches of 40 batches, then shuffled."""
    stretch = 40 * size
    for start in range(0, len(lengths), stretch):
        block = start + np.argsort(lengths[start : start + stretch], kind="stable")
        cut = [block[i : i + size] for i in range(0, len(block), size)]
        rng.shuffle(cut)
        yield from cut
