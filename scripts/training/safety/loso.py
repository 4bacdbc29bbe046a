"""Leave-sources-out predictions: each public source scored by models that never saw it.

A random split would flatter: with the same n-grams recall in-domain was twice that on sources never seen.
The project's rows that are held out are scored by the first fold's models, those kept apart by all in turn.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from app.safety.classifiers.classifier import doublings
from app.safety.classifiers.multilingual import (
    HARM,
    TOPICS,
    MultilingualEncoder,
    MultilingualHead,
)
from app.safety.classifiers.ngrams import NGrams
from app.safety.prompt.prompt_screen import ends
from app.safety.text.gloss import Glosser
from app.safety.text.normalize import normalize
from app.safety.text.turns import JOINED_TURNS, SLICE_CHARS, slices
from scripts.training.safety import balance, train_multilingual, train_ngrams
from scripts.training.safety.rows import KEPT_APART, Row
from scripts.training.safety.train_multilingual import Vectors
from scripts.training.safety.train_ngrams import Features

PER_SOURCE, CHARS_PER_SOURCE = 1500, 700_000
"""Rows scored of a source, harmful and benign each, and characters of theirs: whichever is reached first."""
CHATS = frozenset({"asked", "benign_arena_v01", "benign_flowgpt_chat", "benign_lobe_agents"})
"""Sources whose prompts are also read as a chat's newest turns, which the prompt screen joins."""
NUM_CHATS = 600
"""Chats of each."""
NGRAMS = 0.7
"""How much a logit of the n-grams counts for one of the encoder in English.

Sources left out, 0, 0.4 and 0.8 find 33%, 43% and 46% of harmful prompts where one ordinary English prompt in
500 is refused, and 77%, 83% and 83% where one in 20 is.
"""
LENGTH = 0.15
"""How much of it each doubling of a text's length takes off: without any the longest texts decide."""
FAST_LENGTH = 0.5
"""How much of a logit of the n-grams alone each doubling takes off."""


@dataclass(frozen=True, slots=True)
class Predictions:
    """Rows and what the models that never saw them say: arrays of one length, topics (rows, categories).

    `multilingual` and `ngrams` are the logits of a row's most harmful slice, `doublings` its length. `quick`
    is the n-grams' logit of what the prompt screen reads on the loop, `quick_doublings` the length of that.
    `gloss` is the encoder's logit of the row word by word in English, not a number where it has no gloss.
    """

    text: NDArray[np.str_]
    source: NDArray[np.str_]
    harmful: NDArray[np.bool_]
    category: NDArray[np.str_]
    language: NDArray[np.str_]
    own: NDArray[np.bool_]
    multilingual: NDArray[np.float32]
    is_english: NDArray[np.bool_]
    is_ascii: NDArray[np.bool_]
    ngrams: NDArray[np.float64]
    doublings: NDArray[np.float64]
    quick: NDArray[np.float64]
    quick_doublings: NDArray[np.float64]
    num_chars: NDArray[np.int64]
    topics: NDArray[np.float32]
    gloss: NDArray[np.float32]

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
                row for row in rows if (row.source, row.harmful, row.kind) == (source, harmful, "prompt")
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


def scored(
    rows: Sequence[Row], head: MultilingualHead, encoder: MultilingualEncoder, ngrams: NGrams
) -> Predictions:
    """What the models say about the rows' plain forms, read in slices as the prompt screen does."""
    owners: list[int] = []
    pieces: list[list[int]] = []
    counted: list[float] = []
    english: list[bool] = []
    lengths: list[float] = []
    for index, row in enumerate(rows):
        for piece in slices(row.text):
            parts = encoder.windows(piece)
            owners.extend([index] * len(parts))
            pieces.extend(parts)
            logit, places = ngrams.look(normalize(piece))
            counted.extend([logit] * len(parts))
            english.extend([ngrams.is_english(places)] * len(parts))
            lengths.extend([doublings(len(piece))] * len(parts))
    each = head.logits(train_multilingual.vectors_of(encoder, pieces))
    owner, of_slice, length = np.array(owners), np.array(counted), np.array(lengths)
    # The most harmful window of a row is its last.
    order = np.lexsort((each[:, HARM] + NGRAMS * of_slice - LENGTH * length, owner))
    glosser = Glosser.load()
    quick = [max(_quick(ngrams, row.text)) for row in rows]
    best = order[np.append(np.flatnonzero(np.diff(owner[order])), len(order) - 1)]
    return Predictions(
        text=np.array([row.text[:400] for row in rows]),
        source=np.array([row.source for row in rows]),
        harmful=np.array([bool(row.harmful) for row in rows]),
        category=np.array([row.category or row.near or "" for row in rows]),
        language=np.array([row.language or "" for row in rows]),
        own=np.array([row.own for row in rows]),
        multilingual=each[best, HARM],
        is_english=np.array(english)[best],
        is_ascii=np.array([row.text.isascii() for row in rows]),
        ngrams=of_slice[best],
        doublings=length[best],
        quick=np.array([logit for _, logit, _ in quick]),
        quick_doublings=np.array([length for _, _, length in quick]),
        num_chars=np.array([len(row.text) for row in rows]),
        topics=each[best, TOPICS:],
        gloss=np.array([_gloss(row.text, head, encoder, glosser) for row in rows], np.float32),
    )


def _gloss(text: str, head: MultilingualHead, encoder: MultilingualEncoder, glosser: Glosser) -> float:
    """The logit of what a text is word by word in English; not a number where it has no gloss."""
    gloss = glosser.gloss(text[:SLICE_CHARS])
    if gloss is None:
        return math.nan
    return float(head.logits(encoder.vectors(encoder.windows(gloss)))[:, HARM].max())


def _quick(ngrams: NGrams, text: str) -> Iterator[tuple[float, float, float]]:
    """Of each passage that the prompt screen reads on the loop: what it counts for, its logit, its length."""
    for passage in ends(text):
        logit, length = ngrams.look(normalize(passage))[0], doublings(len(passage))
        yield logit - FAST_LENGTH * length, logit, length


def fold(
    number: int,
    rows: Sequence[Row],
    features: Features,
    vectors: Vectors,
    encoder: MultilingualEncoder,
    *,
    with_own: bool = True,
) -> Predictions:
    """Train without a fold's sources, and score them."""
    left_out = balance.FOLDS[number]
    print(f"fold {number}: without {', '.join(left_out)}", flush=True)
    seen = balance.for_training(rows, left_out, with_own=with_own)
    ngrams = train_ngrams.train(features.prompts(seen), features)
    head = train_multilingual.train(vectors.without(left_out, with_own=with_own))
    unseen = sample(rows, left_out)
    if number == 0:
        unseen += [row for row in rows if row.own and row.held_out and row.kind == "prompt"]
    kept_apart = [row for row in rows if row.source.startswith(KEPT_APART)]
    return scored(unseen + kept_apart[number :: len(balance.FOLDS)], head, encoder, ngrams)


def joined(folds: Sequence[Predictions]) -> Predictions:
    """All predictions as one."""
    columns = [asdict(predictions) for predictions in folds]
    return Predictions(**{name: np.concatenate([column[name] for column in columns]) for name in columns[0]})
