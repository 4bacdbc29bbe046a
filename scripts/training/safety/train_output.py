"""Trains the model that hears every token of an answer: output.npz.

Logistic regression over what the stream screen hears: whole replies, their beginnings, windows of them;
and prompts, for what they speak of. Refusals are among the benign ones. Words have their meaning from the
published MiniLM (scripts/training/safety/requirements.txt names it). What it suspects is examined by the
encoder; what comes of both is measured in answer_folds.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression

from app.safety.classifiers.output_model import BITS
from scripts.training.safety import replies
from scripts.training.safety.replies import Reply
from scripts.training.safety.rows import Row
from scripts.training.safety.word_vectors import WordVectors

SUSPECT_SHARE = 0.11
"""The share of harmless answers that an examination may be spent on, of those that were trained on."""
MOST_REPLIES = 400
"""Replies of a source that are heard to find that share."""
PROMPTS = frozenset({
    "aart", "advbench", "benign_arena_v01", "benign_coconot_pref", "benign_cyber_frr", "benign_gpteacher",
    "benign_medquad", "benign_safe_prompts", "benign_selfinstruct", "catqa_harmfulqa", "figstep",
    "hate_davidson", "sap200", "toxicity_surge", "toxigen_safenlp", "xsafety_en",
})  # fmt: skip
"""Prompts that are read as if they were answers: what is asked for is what a harmful answer speaks of."""
Weights = NDArray[np.float32]

_CUTS = 5
_C = 2.0
_LEAST_GRAMS = 100  # fewer are divided by as if they were so many: a beginning says little
DRIFT = 0.1
"""What is taken off for each n-gram that is heard: the sum of harmless text falls."""
_SHARES: Mapping[str, float] = MappingProxyType({"out_diasafety": 0.35, "out_sap_auto": 0.5})
_OWN = 3.0
_PROMPT, _OWN_PROMPT = 3.0, 9.0
_SEED = 4


def heard(every: Sequence[Row]) -> list[Reply]:
    """The rows that the model of answers learns from, read: answers, own prompts, and some public ones."""
    chosen = (row for row in every if row.harmful is not None and _is_heard(row))
    return [text for text in map(replies.read, chosen) if len(text) > 2]


def _is_heard(row: Row) -> bool:
    return row.kind == "output" or row.own or row.source in PROMPTS


def matrix(
    heard: Sequence[Reply], rng: random.Random, max_cuts: int = _CUTS
) -> tuple[csr_matrix, NDArray[np.bool_], NDArray[np.float64]]:
    """Stretches of replies as rows, each place once over the root of their number; the answers; weights."""
    places: list[NDArray[np.int32]] = []
    harmful: list[bool] = []
    weights: list[float] = []
    for reply in heard:
        spans = replies.cuts(reply, rng, max_cuts) if reply.row.kind == "output" else [(0, len(reply))]
        for start, end in spans:
            places.append(np.unique(reply.between(start, end)))
            harmful.append(bool(reply.row.harmful))
            weights.append(_weight(reply) / len(spans))
    counts = np.array([len(at) for at in places])
    data = np.repeat(1.0 / np.sqrt(np.maximum(counts, _LEAST_GRAMS)), counts).astype(np.float32)
    ends = np.concatenate([[0], counts.cumsum()])
    features = csr_matrix((data, np.concatenate(places), ends), (len(harmful), 1 << BITS))
    return features, np.array(harmful), np.array(weights)


def _weight(reply: Reply) -> float:
    if reply.row.kind == "prompt":
        return _OWN_PROMPT if reply.row.own else _PROMPT
    return _OWN if reply.row.own else _SHARES.get(reply.row.source, 1.0)


def fit(heard: Sequence[Reply], vectors: WordVectors) -> Weights:
    """The weights for these texts, by regression on NB-weighted n-grams and on what the words mean.

    Both answers count alike.
    """
    features, harmful, weights = matrix(heard, random.Random(_SEED))  # noqa: S311  (reproducible, not secret)
    weights = weights / np.where(harmful, weights[harmful].sum(), weights[~harmful].sum())
    weights *= len(weights) / weights.sum()
    present = features.astype(bool).astype(np.float64)
    yes, no = 1.0 + present.T @ (weights * harmful), 1.0 + present.T @ (weights * ~harmful)
    log = np.log((yes / yes.sum()) / (no / no.sum()))
    ratio = np.sign(log) * np.maximum(np.abs(log), 0.2)
    scaled = features.multiply(ratio[None, :]).tocsr().astype(np.float32)
    model = LogisticRegression(C=_C, solver="liblinear", max_iter=60, tol=1e-3)
    meanings = vectors.table(heard)
    model.fit(hstack([scaled, csr_matrix(features @ meanings)]).tocsr(), harmful, sample_weight=weights)
    own, shared = np.split(model.coef_[0], [1 << BITS])
    result: Weights = (own * ratio + meanings @ shared).astype(np.float32)
    return result


def reached(weights: Weights, some: Sequence[Reply]) -> NDArray[np.float64]:
    """The highest sum that two tokens in a row of each reply have."""
    sums = (replies.sums(weights, DRIFT, [(reply, len(reply))]) for reply in some)
    return np.array([replies.twice(each) for each in sums])


def suspect_at(weights: Weights, texts: Sequence[Reply]) -> float:
    """The sum that SUSPECT_SHARE of harmless answers reach, and so are examined."""
    return float(np.quantile(reached(weights, sample(texts, harmful=False)), 1 - SUSPECT_SHARE))


def line_of(weights: Weights, texts: Sequence[Reply]) -> tuple[float, float]:
    """Slope and intercept from the sum to a logit of the probability."""
    no = reached(weights, sample(texts, harmful=False))
    yes = reached(weights, sample(texts, harmful=True))
    both = np.concatenate([no, yes])[:, None]
    platt = LogisticRegression(C=100.0, class_weight="balanced").fit(both, np.arange(len(both)) >= len(no))
    return float(platt.coef_[0, 0]), float(platt.intercept_[0])


def sample(texts: Sequence[Reply], *, harmful: bool) -> list[Reply]:
    """Answers of every source, at random, at most MOST_REPLIES of each."""
    answers = [t for t in texts if t.row.kind == "output" and bool(t.row.harmful) == harmful]
    rng = np.random.default_rng(_SEED)
    chosen: list[Reply] = []
    for source in sorted({text.row.source for text in answers}):
        some = [text for text in answers if text.row.source == source]
        chosen += [some[i] for i in rng.permutation(len(some))[:MOST_REPLIES]]
    return chosen


def train(texts: Sequence[Reply], vectors: WordVectors, folder: Path) -> None:
    """Train on all texts that are not held out, and write output.npz."""
    seen = [text for text in texts if not text.row.held_out]
    harm = fit(seen, vectors)
    slope, intercept = line = line_of(harm, seen)
    suspect = 1.0 / (1.0 + np.exp(-(suspect_at(harm, seen) * slope + intercept)))
    np.savez_compressed(
        folder / "output.npz",
        harm=harm.astype(np.float16),
        drift=np.float64(DRIFT),
        line=np.array(line),
        suspect_at=np.float64(suspect),
    )
