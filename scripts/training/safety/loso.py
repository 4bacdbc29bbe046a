"""Leave-sources-out predictions: each public source scored by models that never saw it.

A random split would flatter: with the same n-grams recall in-domain was twice that on sources never seen.
The project's rows that are held out are scored by the first fold's models.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix

from app.safety.categories import CATEGORIES
from app.safety.classifiers.encoder import windows
from app.safety.classifiers.ngrams import NGrams
from app.safety.text.normalize import normalize
from scripts.training.safety import balance, train_encoder, train_ngrams
from scripts.training.safety.minilm import MiniLM
from scripts.training.safety.rows import Row
from scripts.training.safety.tokens import Wordpieces

ABLATED = 2
"""The fold that is trained once more without the project's rows, encoder and all."""
PER_SOURCE = 700
"""Rows scored of a source, harmful and benign each."""
OWN_AGAIN = 0.4
"""How often a fold's encoder sees the project's rows once it goes on from one that saw nothing else."""
_CHARS = 4_000
_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class Predictions:
    """Rows and what the models that never saw them say: arrays of one length, topics (rows, categories)."""

    text: NDArray[np.str_]
    source: NDArray[np.str_]
    harmful: NDArray[np.bool_]
    output: NDArray[np.bool_]
    category: NDArray[np.str_]
    own: NDArray[np.bool_]
    encoder: NDArray[np.float32]
    ngrams: NDArray[np.float64]
    topics: NDArray[np.float32]
    num_windows: NDArray[np.int64]

    def save(self, path: Path) -> None:
        """Write all arrays to an .npz file."""
        np.savez_compressed(path, **asdict(self))

    def where(self, chosen: NDArray[np.bool_]) -> Predictions:
        """Those rows alone."""
        return Predictions(**{name: column[chosen] for name, column in asdict(self).items()})

    @classmethod
    def load(cls, path: Path) -> Predictions:
        """Read what `save` wrote."""
        with np.load(path, allow_pickle=False) as arrays:
            return cls(**{name: arrays[name] for name in arrays.files})


def sample(rows: Sequence[Row], sources: Sequence[str], seed: int = 0) -> list[Row]:
    """At most PER_SOURCE harmful and as many benign prompts of each source."""
    rng = random.Random(seed)  # noqa: S311  # a sample, no secret
    chosen: list[Row] = []
    for source in sources:
        for harmful in (True, False):
            candidates = [
                r for r in rows if r.source == source and r.harmful is harmful and r.kind == "prompt"
            ]
            chosen.extend(rng.sample(candidates, min(PER_SOURCE, len(candidates))))
    return chosen


def scored(rows: Sequence[Row], model: MiniLM | None, ngrams: NGrams, weights: Path) -> Predictions:
    """What the two models say about the rows' plain forms; without an encoder its logits are 0."""
    wordpieces = Wordpieces(weights)
    owners: list[int] = []
    pieces: list[list[int]] = []
    for index, row in enumerate(rows):
        for piece in windows(wordpieces.ids(normalize(row.text[:_CHARS])))[:_WINDOWS]:
            owners.append(index)
            pieces.append(piece)
    each = np.zeros((len(pieces), 1 + len(CATEGORIES)), np.float32)
    if model is not None:
        each = train_encoder.logits(model, pieces)
    owner = np.array(owners)
    order = np.lexsort((each[:, 0], owner))  # the most harmful window of a row is its last here
    best = order[np.append(np.flatnonzero(np.diff(owner[order])), len(order) - 1)]
    return Predictions(
        text=np.array([row.text[:400] for row in rows]),
        source=np.array([row.source for row in rows]),
        harmful=np.array([bool(row.harmful) for row in rows]),
        output=np.array([row.kind == "output" for row in rows]),
        category=np.array([row.category or row.near or "" for row in rows]),
        own=np.array([row.own for row in rows]),
        encoder=each[best, 0],
        ngrams=train_ngrams.logits(ngrams, [row.text for row in rows]),
        topics=each[best, 1:],
        num_windows=np.bincount(owner),
    )


def fold(
    number: int,
    rows: Sequence[Row],
    features: csr_matrix,
    weights: Path,
    examples: int,
    *,
    with_own: bool = True,
    start: Path | None = None,
) -> Predictions:
    """Train without a fold's sources, with `examples` for the encoder (0: n-grams only), and score them.

    `start` is an encoder to go on from, that has not seen them either.
    """
    left_out = balance.FOLDS[number]
    print(f"fold {number}: without {', '.join(left_out)}", flush=True)
    place = {id(row): index for index, row in enumerate(rows)}
    seen = balance.for_training(rows, left_out, with_own=with_own)
    ngrams = train_ngrams.train(seen, features[[place[id(row)] for row in seen]])
    model = None
    if examples:
        recipe = train_encoder.Recipe(examples, seed=number, own_share=OWN_AGAIN if start else 1.0)
        model = train_encoder.train(seen, weights, recipe, start)
    unseen = sample(rows, left_out)
    if number == 0:
        unseen += [row for row in rows if row.own and row.held_out]
    return scored(unseen, model, ngrams, weights)


def joined(parts: Sequence[Predictions]) -> Predictions:
    """All predictions as one."""
    columns = [asdict(predictions) for predictions in parts]
    return Predictions(**{name: np.concatenate([column[name] for column in columns]) for name in columns[0]})
