"""Trains the model of answers, and measures it on sources left out.

    python -m scripts.training.safety.train_output --data DIR --weights DIR [--report FILE]

Logistic regression over what the stream screen hears: whole replies, their beginnings, windows of them;
and prompts, for what they speak of. Refusals are among the benign ones. Words have their meaning from the
published MiniLM (scripts/training/safety/requirements.txt names it). What is reported: replies of a
source left out of training, spliced after the beginning of a benign one and heard token by token, at a
threshold that benign replies of origins left out likewise reach in 2%. Writes output.npz, and `output`
in calibration.json.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix, hstack
from sklearn.linear_model import LogisticRegression

from app.safety.categories import CATEGORIES
from app.safety.classifiers.output_model import BITS, CATEGORY_BITS
from scripts.training.safety import replies, rows
from scripts.training.safety.replies import Reply
from scripts.training.safety.word_vectors import WordVectors

MODELS = Path(__file__).resolve().parents[3] / "app" / "safety" / "models"
TARGETS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
REPORTED = 0.02
LEFT_OUT = ("out_gptfuzz", "out_diasafety", "out_sap_auto", "out_advbench_strings")
"""Sources with harmful replies, each measured without having been seen."""
RELATED: Mapping[str, tuple[str, ...]] = MappingProxyType({"out_sap_auto": ("sap200",)})
"""Prompts of the same origin, which are then left out as well."""
PROMPTS = frozenset({
    "aart", "advbench", "benign_arena_v01", "benign_coconot_pref", "benign_cyber_frr", "benign_gpteacher",
    "benign_medquad", "benign_safe_prompts", "benign_selfinstruct", "catqa_harmfulqa", "figstep",
    "hate_davidson", "sap200", "toxicity_surge", "toxigen_safenlp", "xsafety_en",
})  # fmt: skip
"""Prompts that are read as if they were answers: what is asked for is what a harmful answer speaks of."""
BENIGN_FOLDS = (("lmarena", "self-instruct"), ("noncompliance",), ("GPTeacher", "MedQuAD"))
"""Origins of benign replies that are left out together."""

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


@dataclass(frozen=True, slots=True)
class Fold:
    """Weights, and the benign replies that they have not seen."""

    weights: Weights
    benign: Sequence[Reply]
    reached: NDArray[np.float64]
    """What each of these reaches at two tokens in a row."""


def folds(texts: Sequence[Reply], vectors: WordVectors, without: Sequence[str] = ()) -> list[Fold]:
    """Weights for each set of origins, trained without it and without some sources."""
    made = []
    for origins in BENIGN_FOLDS:
        benign = [text for text in texts if _is_of(text, origins)]
        seen = [text for text in texts if text.row.source not in without and not _is_of(text, origins)]
        weights = fit([text for text in seen if not text.row.held_out], vectors)
        made.append(Fold(weights, benign, _tops(weights, benign)))
    return made


def left_out(texts: Sequence[Reply], vectors: WordVectors, source: str) -> dict[str, Any]:
    """Train without a source, and without benign replies in turn; measure both at one threshold."""
    made = folds(texts, vectors, (source, *RELATED.get(source, ())))
    reached = np.concatenate([fold.reached for fold in made])
    threshold = float(np.quantile(reached, 1 - REPORTED))
    harmful = [text for text in texts if text.row.source == source and text.row.harmful]
    others = {
        "its_benign": [text for text in texts if text.row.source == source and not text.row.harmful],
        "own_benign": [text for text in texts if _is_gate(text) and not text.row.harmful],
        "own_harmful": [text for text in texts if _is_gate(text) and text.row.harmful],
    }
    return {
        "source": source,
        "replies": len(harmful),
        **_halts(made, threshold, harmful),
        "at": {
            target: _halts(made, float(np.quantile(reached, 1 - target)), harmful)
            for target in TARGETS
            if target > REPORTED
        },
        "halted_unspliced": _share(made, threshold, harmful),
        "halted_of_benign": {
            fold.benign[0].row.group.split(":")[0]: float((fold.reached >= threshold).mean()) for fold in made
        },
        **{name: _share(made, threshold, some) for name, some in others.items() if some},
    }


def _halts(made: Sequence[Fold], threshold: float, harmful: Sequence[Reply]) -> dict[str, Any]:
    """How many harmful replies are halted after a benign beginning, and after how many of their tokens."""
    rng = random.Random(_SEED)  # noqa: S311  (reproducible, not secret)
    halts = [at for fold in made for at in _spliced(fold, threshold, harmful, rng)]
    after = [tokens for tokens in halts if tokens is not None]
    return {
        "halted": len(after) / len(halts),
        "after_tokens": {
            f"p{percent}": int(np.quantile(after, percent / 100)) for percent in (10, 25, 50, 75, 90)
        },
        "contained": {hold: sum(t <= hold for t in after) / len(after) for hold in (16, 32, 64, 128)},
    }


def _spliced(fold: Fold, threshold: float, harmful: Sequence[Reply], rng: random.Random) -> list[int | None]:
    """For each harmful reply after a benign beginning: after how many of its tokens it was halted, if so."""
    beginnings = [reply for reply in fold.benign if len(reply) > 30]
    halts = []
    for reply in harmful:
        beginning = rng.choice(beginnings)
        cut = rng.randrange(15, min(120, len(beginning)))
        heard = replies.sums(fold.weights, DRIFT, [(beginning, cut), (reply, len(reply))])
        at = replies.halted_at(heard, threshold)
        halts.append(None if at is None else max(0, at - cut))
    return halts


def _share(made: Sequence[Fold], threshold: float, some: Sequence[Reply]) -> float:
    """The share that reaches a threshold, over all folds."""
    return float((np.concatenate([_tops(fold.weights, some) for fold in made]) >= threshold).mean())


def _tops(weights: Weights, some: Sequence[Reply]) -> NDArray[np.float64]:
    return np.array([replies.twice(replies.sums(weights, DRIFT, [(reply, len(reply))])) for reply in some])


def _is_of(reply: Reply, origins: tuple[str, ...]) -> bool:
    return reply.row.source == "out_benign" and any(name in reply.row.group for name in origins)


def _is_gate(reply: Reply) -> bool:
    return reply.row.held_out and reply.row.kind == "output"


@dataclass(frozen=True, slots=True)
class Calibration:
    """Slope and intercept from the sum to a logit of the probability, and the thresholds of the targets."""

    line: tuple[float, float]
    thresholds: list[float]


def calibrated(texts: Sequence[Reply], vectors: WordVectors) -> Calibration:
    """By weights that have not seen the benign replies they are held against."""
    made = folds(texts, vectors)
    no = np.concatenate([fold.reached for fold in made])
    gate = [text for text in texts if _is_gate(text) and text.row.harmful]
    yes = np.concatenate([_tops(fold.weights, gate) for fold in made])
    both = np.concatenate([no, yes])[:, None]
    platt = LogisticRegression(C=100.0, class_weight="balanced").fit(both, np.arange(len(both)) >= len(no))
    slope, offset = float(platt.coef_[0, 0]), float(platt.intercept_[0])
    reached = np.quantile(no, [1 - target for target in TARGETS]) * slope + offset
    return Calibration((slope, offset), [float(p) for p in 1 / (1 + np.exp(-reached))])


def topics(texts: Sequence[Reply]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """For each category its weights over fewer places, and its offset; for one without rows none at all."""
    categorized = [
        reply for reply in texts if reply.row.category in CATEGORIES[:-1] and not reply.row.held_out
    ]
    features, _, _ = matrix(categorized, random.Random(_SEED), max_cuts=1)  # noqa: S311  (reproducible, not secret)
    few = 1 << CATEGORY_BITS
    folded = csr_matrix((features.data, features.indices % few, features.indptr), (len(categorized), few))
    model = LogisticRegression(C=3.0, max_iter=60, tol=1e-3)
    model.fit(folded, [reply.row.category for reply in categorized])
    weights = np.zeros((len(CATEGORIES), few), np.float32)
    offsets = np.full(len(CATEGORIES), -20.0, np.float32)
    for code, row, offset in zip(model.classes_, model.coef_, model.intercept_, strict=True):
        weights[CATEGORIES.index(code)] = row
        offsets[CATEGORIES.index(code)] = offset
    return weights, offsets


def save(folder: Path, harm: Weights, by: Calibration, about: tuple[Weights, Weights]) -> None:
    """Write output.npz, and the thresholds beside those of the prompts."""
    weights, offsets = about
    scale = float(np.abs(weights).max()) / 127
    np.savez_compressed(
        folder / "output.npz",
        harm=harm.astype(np.float16),
        categories=np.round(weights / scale).astype(np.int8),
        category_scale=np.float32(scale),
        offsets=offsets,
        drift=np.float64(DRIFT),
        line=np.array(by.line),
    )
    path = folder / "calibration.json"
    document = json.loads(path.read_text()) if path.exists() else {"version": 1}
    row = {"fpr": list(TARGETS), "threshold": [round(value, 4) for value in by.thresholds]}
    document["output"] = dict.fromkeys(CATEGORIES, row)
    path.write_text(json.dumps(document, indent=1) + "\n")


def main() -> None:
    """Train and save, then measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True, help="the public files")
    parser.add_argument("--weights", type=Path, required=True, help="all-MiniLM-L6-v2 as published")
    parser.add_argument("--report", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--models", type=Path, default=MODELS, help="where the model goes")
    args = parser.parse_args()
    every = [row for row in (*rows.public(args.data), *rows.own()) if row.harmful is not None]
    texts = [replies.read(row) for row in every if row.kind == "output" or row.own or row.source in PROMPTS]
    texts = [text for text in texts if len(text) > 2]
    vectors = WordVectors(args.weights, [text.row.text for text in texts])
    by = calibrated(texts, vectors)
    harm = fit([text for text in texts if not text.row.held_out], vectors)
    save(args.models, harm, by, topics(texts))
    print(json.dumps({"thresholds": dict(zip(TARGETS, by.thresholds, strict=True))}), flush=True)
    figures = []
    for source in LEFT_OUT:
        figures.append(left_out(texts, vectors, source))
        print(json.dumps(figures[-1]), flush=True)
    if args.report is not None:
        args.report.write_text(json.dumps({"left_out": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
