"""What words mean, for the model of answers: words never seen in training weigh like those they are near.

Each word alone through the published MiniLM, its mean vector; centred, cut to the main directions, rare
words before frequent ones (Arora et al., ICLR 2017). A weight on each direction is a weight for each word,
so that serving needs none of this: the table of n-grams has taken it in.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn.functional import normalize

from app.safety.classifiers.output_model import BITS, plain_bytes
from scripts.training.safety.minilm import MiniLM, pretrained
from scripts.training.safety.replies import Reply
from scripts.training.safety.tokens import Wordpieces, padded

DIRECTIONS = 128
_LEAST_TEXTS = 3  # a word of fewer that is not in the vocabulary has no vector
_RARE = 0.01  # share of texts at which a word's vector is halved
_MAX_WORD_CHARS = 20
_LONGEST_PIECES = 6
_LENGTH = 2.0  # of the average vector, against an n-gram's NB ratio: how far these are trusted
_BATCH = 256


class WordVectors:
    """The vectors of all words that the texts have, and of the vocabulary."""

    def __init__(self, weights: Path, texts: Iterable[str]) -> None:
        vocabulary = {word.encode() for word in (weights / "vocab.txt").read_text().splitlines()}
        text_words = {word for text in texts for word in plain_bytes(text).split()}
        words = sorted(word for word in vocabulary | text_words if _is_plain(word))
        self._common = np.array([word in vocabulary for word in words])
        self._places = np.array([zlib.crc32(word) & ((1 << BITS) - 1) for word in words])
        self._vectors = _embedded([word.decode() for word in words], weights)

    def table(self, seen: Sequence[Reply]) -> NDArray[np.float32]:
        """(places, directions): by the words that these texts have, and how many of them have each."""
        texts_with = np.zeros(1 << BITS)
        for reply in seen:
            texts_with[np.unique(reply.places[::3])] += 1  # a word, its pair, its stem
        number = texts_with[self._places]
        kept = self._common | (number >= _LEAST_TEXTS)
        places, vectors, number = self._places[kept], self._vectors[kept], number[kept]
        vectors = vectors - (vectors * number[:, None]).sum(0) / number.sum()
        main = np.linalg.svd(vectors[number >= _LEAST_TEXTS][::3], full_matrices=False)[2][:DIRECTIONS]
        short = vectors @ main.T
        short *= _LENGTH / np.sqrt((short**2).sum(1).mean())
        short *= (_RARE / (_RARE + number / len(seen)))[:, None]
        result = np.zeros((1 << BITS, DIRECTIONS), np.float32)
        np.add.at(result, places, short.astype(np.float32))
        return result


def _is_plain(word: bytes) -> bool:
    return 1 < len(word) < _MAX_WORD_CHARS and word.isascii() and word.isalnum()


def _embedded(words: Sequence[str], weights: Path) -> NDArray[np.float32]:
    """(words, width) of length 1."""
    model, pieces = pretrained(weights, 1).eval(), Wordpieces(weights)
    ids = [pieces.ids(word)[:_LONGEST_PIECES] for word in words]
    order = sorted(range(len(words)), key=lambda i: len(ids[i]))
    result = np.zeros((len(words), model.words.embedding_dim), np.float32)
    with torch.inference_mode():
        for start in range(0, len(order), _BATCH):
            some = order[start : start + _BATCH]
            result[some] = _mean(model, *padded([ids[i] for i in some])).numpy()
    return result


def _mean(model: MiniLM, ids: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
    """The mean of the last layer over a word's pieces and their marks."""
    x = model.norm(model.words(ids) + model.positions.weight[: ids.shape[1]])
    mask = ((1.0 - attention) * -1e4)[:, None, None, :]
    for layer in model.layers:
        x = layer(x, mask)
    return normalize((x * attention[..., None]).sum(1), dim=1)
