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

from app.safety.categories import CATEGORIES
from app.safety.classifiers.classifier import doublings, is_other_script
from app.safety.classifiers.encoder import ANSWER, PROMPT, windows
from app.safety.classifiers.ngrams import NGrams
from app.safety.screens.prompt_screen import ends
from app.safety.text.gloss import Glosser
from app.safety.text.normalize import normalize
from app.safety.text.turns import JOINED_TURNS, slices
from scripts.training.safety import balance, train_encoder, train_ngrams
from scripts.training.safety.minilm import MiniLM
from scripts.training.safety.rows import Row
from scripts.training.safety.tokens import Wordpieces
from scripts.training.safety.train_ngrams import Features

ABLATED = 2
"""The fold that is trained once more without the project's rows, encoder and all."""
PER_SOURCE, CHARS_PER_SOURCE = 1500, 700_000
"""Rows scored of a source, harmful and benign each, and characters of theirs: whichever is reached first."""
CHATS = frozenset({"asked", "benign_arena_v01", "benign_flowgpt_chat", "benign_lobe_agents"})
"""Sources whose prompts are also read as a chat's newest turns, which the prompt screen joins."""
NUM_CHATS = 600
"""Chats of each."""
NGRAMS = 0.8
"""How much a logit of the n-grams counts for one of the encoder.

Sources left out, 0.4, 0.6 and 0.8 find 30.5%, 32.8% and 34.8% of harmful prompts.
"""
LENGTH = 0.15
"""How much of it each doubling of a text's length takes off.

Where no group of ordinary prompts may be refused at more than 0.5%, sources left out, 0.15, 0.2 and 0.3 find
34.8%, 34.4% and 34.3% of harmful prompts (the mean of fifteen sources); without any the longest texts decide.
"""
FAST_LENGTH = 0.5
"""How much of a logit of the n-grams alone each doubling takes off."""
OWN_AGAIN = 0.4
"""How often a fold's encoder sees the project's rows once it goes on from one that saw nothing else."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Rows and what the models that never saw them say: arrays of one length, topics (rows, categories).

    `encoder` and `ngrams` are the logits of a row's most harmful slice, `doublings` its length. `quick` is
    the n-grams' logit of what the prompt screen reads on the loop, and `quick_doublings` the length of that.
    """

    text: NDArray[np.str_]
    source: NDArray[np.str_]
    harmful: NDArray[np.bool_]
    output: NDArray[np.bool_]
    category: NDArray[np.str_]
    own: NDArray[np.bool_]
    encoder: NDArray[np.float32]
    ngrams: NDArray[np.float64]
    doublings: NDArray[np.float64]
    quick: NDArray[np.float64]
    quick_doublings: NDArray[np.float64]
    other_script: NDArray[np.bool_]
    num_chars: NDArray[np.int64]
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
    """Harmful and benign prompts of each source, at random, up to the limits above."""
    rng = random.Random(seed)  # noqa: S311  # a sample, no secret
    chosen: list[Row] = []
    for source in sources:
        for harmful in (True, False):
            candidates = [
                row
                for row in rows
                if (row.source, row.harmful, row.kind) == (source, harmful, "prompt") and not row.is_gloss
            ]
            rng.shuffle(candidates)
            sizes = np.cumsum([len(row.text) for row in candidates[:PER_SOURCE]])
            chosen.extend(candidates[: 1 + int(np.searchsorted(sizes, CHARS_PER_SOURCE))])
    for source in set(sources) & CHATS:
        texts = [row.text for row in chosen if row.source == source]
        joined_turns = ("\n".join(rng.sample(texts, JOINED_TURNS)) for _ in range(NUM_CHATS))
        chosen.extend(Row(text, harmful=False, source=turns_of(source)) for text in joined_turns)
    return chosen


def turns_of(source: str) -> str:
    """The name of the source that has several prompts of another as the turns of a chat."""
    return f"turns of {source}"


def scored(rows: Sequence[Row], model: MiniLM | None, ngrams: NGrams, weights: Path) -> Predictions:
    """What the two models say about the rows' plain forms, read in slices as the prompt screen does.

    Without an encoder its logits are 0.
    """
    wordpieces, glosser = Wordpieces(weights), Glosser.load()
    owners: list[int] = []
    pieces: list[list[int]] = []
    counted: list[float] = []
    lengths: list[float] = []
    for index, row in enumerate(rows):
        for piece in slices(row.text):
            for text in _read(piece, glosser):
                parts = windows(wordpieces.ids(text))
                owners.extend([index] * len(parts))
                pieces.extend(parts)
                counted.extend([ngrams.look(text)[0]] * len(parts))
                lengths.extend([doublings(len(piece))] * len(parts))
    each = np.zeros((len(pieces), 2 + len(CATEGORIES)), np.float32)
    if model is not None:
        each = train_encoder.logits(model, pieces)
    owner, of_slice, length = np.array(owners), np.array(counted), np.array(lengths)
    # The most harmful window of a row is its last.
    order = np.lexsort((each[:, PROMPT] + NGRAMS * of_slice - LENGTH * length, owner))
    quick = [max(_quick(ngrams, glosser, row.text)) for row in rows]
    best = order[np.append(np.flatnonzero(np.diff(owner[order])), len(order) - 1)]
    return Predictions(
        text=np.array([row.text[:400] for row in rows]),
        source=np.array([row.source for row in rows]),
        harmful=np.array([bool(row.harmful) for row in rows]),
        output=np.array([row.kind == "output" for row in rows]),
        category=np.array([row.category or row.near or "" for row in rows]),
        own=np.array([row.own for row in rows]),
        encoder=each[best, PROMPT],
        ngrams=of_slice[best],
        doublings=length[best],
        quick=np.array([logit for _, logit, _ in quick]),
        quick_doublings=np.array([length for _, _, length in quick]),
        other_script=np.array([is_other_script(row.text) for row in rows]),
        num_chars=np.array([len(row.text) for row in rows]),
        topics=each[best, 1:ANSWER],
        num_windows=np.bincount(owner),
    )


def _read(passage: str, glosser: Glosser) -> list[str]:
    """A passage as the classifier reads it, without what is disguised."""
    gloss = glosser.gloss(passage)
    return [normalize(passage)] if gloss is None else [normalize(passage), gloss]


def _quick(ngrams: NGrams, glosser: Glosser, text: str) -> list[tuple[float, float, float]]:
    """Of each passage that the prompt screen reads on the loop: what it counts for, its logit, its length."""
    read = [
        (max(ngrams.look(form)[0] for form in _read(passage, glosser)), doublings(len(passage)))
        for passage in ends(text)
    ]
    return [(logit - FAST_LENGTH * length, logit, length) for logit, length in read]


def fold(
    number: int,
    rows: Sequence[Row],
    features: Features,
    weights: Path,
    examples: int,
    *,
    with_own: bool = True,
    start: Path | None = None,
) -> tuple[Predictions, MiniLM | None]:
    """Train without a fold's sources, with `examples` for the encoder (0: n-grams only), and score them.

    `start` is an encoder to go on from, that has not seen them either.
    """
    left_out = balance.FOLDS[number]
    print(f"fold {number}: without {', '.join(left_out)}", flush=True)
    seen = balance.for_training(rows, left_out, with_own=with_own)
    ngrams = train_ngrams.train(features.prompts(seen), features)
    model = None
    if examples:
        recipe = train_encoder.Recipe(examples, seed=number, own_share=OWN_AGAIN if start else 1.0)
        model = train_encoder.train(seen, weights, recipe, start)
    unseen = sample(rows, left_out)
    if number == 0:
        unseen += [
            row for row in rows if row.own and row.held_out and row.kind == "prompt" and not row.is_gloss
        ]
    return scored(unseen, model, ngrams, weights), model


def joined(folds: Sequence[Predictions]) -> Predictions:
    """All predictions as one."""
    columns = [asdict(predictions) for predictions in folds]
    return Predictions(**{name: np.concatenate([column[name] for column in columns]) for name in columns[0]})
