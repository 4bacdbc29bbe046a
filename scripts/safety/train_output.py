"""Trains the model of answers, and measures it on sources left out.

    python -m scripts.safety.train_output --data DIR [--report FILE]     (scripts/safety/requirements.txt)

Logistic regression over what the stream screen hears: whole replies, their beginnings, windows of them;
and prompts, for what they speak of. Refusals are among the benign ones. What is reported: replies of a
source left out of training, spliced after the beginning of a benign one and heard token by token, at a
threshold that benign replies of origins left out likewise reach in 2%. Writes output.npz, and `output`
in calibration.json.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_matrix
from sklearn.linear_model import LogisticRegression

from app.safety.categories import CATEGORIES
from app.safety.output_model import BITS, CATEGORY_BITS, LEAST_GRAMS
from scripts.safety import replies, rows
from scripts.safety.replies import Reply, Sums

MODELS = Path(__file__).resolve().parents[2] / "app" / "safety" / "models"
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
_C = 8.0
_SHARES: Mapping[str, float] = MappingProxyType({"out_diasafety": 0.35, "out_sap_auto": 0.5})
_OWN = 3.0
_PROMPT, _OWN_PROMPT = 3.0, 9.0
_SEED = 4


def matrix(
    heard: Sequence[Reply], rng: random.Random, most: int = _CUTS
) -> tuple[csr_matrix, NDArray[np.bool_], NDArray[np.float64]]:
    """Stretches of replies as rows, each place once over the root of their number; the answers; weights."""
    places: list[NDArray[np.int32]] = []
    harmful: list[bool] = []
    weights: list[float] = []
    for reply in heard:
        found = replies.cuts(reply, rng, most) if reply.row.kind == "output" else [(0, len(reply))]
        for start, end in found:
            places.append(np.unique(reply.between(start, end)))
            harmful.append(bool(reply.row.harmful))
            weights.append(_weight(reply) / len(found))
    counts = np.array([len(at) for at in places])
    data = np.repeat(1.0 / np.sqrt(np.maximum(counts, LEAST_GRAMS)), counts).astype(np.float32)
    ends = np.concatenate([[0], counts.cumsum()])
    features = csr_matrix((data, np.concatenate(places), ends), (len(harmful), 1 << BITS))
    return features, np.array(harmful), np.array(weights)


def _weight(reply: Reply) -> float:
    if reply.row.kind == "prompt":
        return _OWN_PROMPT if reply.row.own else _PROMPT
    return _OWN if reply.row.own else _SHARES.get(reply.row.source, 1.0)


def fit(heard: Sequence[Reply]) -> Weights:
    """The weights for these texts, by regression on NB-weighted n-grams; both answers count alike."""
    features, harmful, weights = matrix(heard, random.Random(_SEED))  # noqa: S311  (reproducible, not secret)
    weights = weights / np.where(harmful, weights[harmful].sum(), weights[~harmful].sum())
    weights *= len(weights) / weights.sum()
    present = features.astype(bool).astype(np.float64)
    yes, no = 1.0 + present.T @ (weights * harmful), 1.0 + present.T @ (weights * ~harmful)
    log = np.log((yes / yes.sum()) / (no / no.sum()))
    ratio = np.sign(log) * np.maximum(np.abs(log), 0.2)
    scaled = features.multiply(ratio[None, :]).tocsr().astype(np.float32)
    model = LogisticRegression(C=_C, solver="liblinear", max_iter=60)
    model.fit(scaled, harmful, sample_weight=weights)
    result: Weights = (model.coef_[0] * ratio).astype(np.float32)
    return result


@dataclass(frozen=True, slots=True)
class Fold:
    """Weights, and the benign replies that they have not seen."""

    weights: Weights
    benign: Sequence[Reply]
    heard: Sequence[Sums]


@dataclass(frozen=True, slots=True)
class Scale:
    """How the two sums become one logit."""

    whole: tuple[float, float]
    window: tuple[float, float]

    def logits(self, heard: Sums) -> NDArray[np.float64]:
        """The logit after each token."""
        whole = heard.whole * self.whole[0] + self.whole[1]
        return np.maximum(whole, heard.window * self.window[0] + self.window[1])

    def tops(self, heard: Iterable[Sums]) -> NDArray[np.float64]:
        """What each reply reaches at two tokens in a row."""
        return np.array([replies.twice(self.logits(one)) for one in heard])


def folds(texts: Sequence[Reply], without: Sequence[str] = ()) -> list[Fold]:
    """Weights for each set of origins, trained without it and without some sources."""
    made = []
    for origins in BENIGN_FOLDS:
        benign = [text for text in texts if _is_of(text, origins)]
        seen = [text for text in texts if text.row.source not in without and not _is_of(text, origins)]
        weights = fit([text for text in seen if not text.row.held_out])
        made.append(Fold(weights, benign, _sums(weights, benign)))
    return made


def scale_of(made: Sequence[Fold]) -> Scale:
    """Both sums on one scale: 0 where 2% of benign replies come, 1 where 0.5% do."""
    lines = []
    for name in ("whole", "window"):
        tops = [replies.twice(getattr(one, name)) for fold in made for one in fold.heard]
        low, high = np.quantile(tops, (0.98, 0.995))
        lines.append((1.0 / (high - low), -low / (high - low)))
    return Scale(*lines)


def left_out(texts: Sequence[Reply], source: str) -> dict[str, Any]:
    """Train without a source, and without benign replies in turn; measure both at one threshold."""
    made = folds(texts, (source, *RELATED.get(source, ())))
    scale = scale_of(made)
    reached = np.concatenate([scale.tops(fold.heard) for fold in made])
    threshold = float(np.quantile(reached, 1 - REPORTED))
    found: list[int | None] = []
    rng = random.Random(_SEED)  # noqa: S311  (reproducible, not secret)
    harmful = [text for text in texts if text.row.source == source and text.row.harmful]
    for fold in made:
        found += _spliced(fold, scale, threshold, harmful, rng)
    after = [tokens for tokens in found if tokens is not None]
    others = {
        "its_benign": [text for text in texts if text.row.source == source and not text.row.harmful],
        "own_benign": [text for text in texts if _is_gate(text) and not text.row.harmful],
        "own_harmful": [text for text in texts if _is_gate(text) and text.row.harmful],
    }
    return {
        "source": source,
        "replies": len(harmful),
        "halted": len(after) / len(found),
        "after_tokens": {f"p{part}": int(np.quantile(after, part / 100)) for part in (10, 25, 50, 75, 90)},
        "contained": {hold: sum(t <= hold for t in after) / len(after) for hold in (16, 32, 64, 128)},
        "halted_unspliced": _share(made, scale, threshold, harmful),
        "halted_of_benign": {
            "/".join(fold.benign[0].row.group.split(":")[:1]): float(
                (scale.tops(fold.heard) >= threshold).mean()
            )
            for fold in made
        },
        **{name: _share(made, scale, threshold, some) for name, some in others.items() if some},
    }


def _spliced(
    fold: Fold, scale: Scale, threshold: float, harmful: Sequence[Reply], rng: random.Random
) -> list[int | None]:
    """For each harmful reply after a benign beginning: after how many of its tokens it was halted, if so."""
    beginnings = [reply for reply in fold.benign if len(reply) > 30]
    found = []
    for reply in harmful:
        before = rng.choice(beginnings)
        cut = rng.randrange(15, min(120, len(before)))
        heard = replies.sums(fold.weights, [(before, cut), (reply, len(reply))])
        at = replies.halted_at(scale.logits(heard), threshold)
        found.append(None if at is None else max(0, at - cut))
    return found


def _share(made: Sequence[Fold], scale: Scale, threshold: float, some: Sequence[Reply]) -> float:
    """The share that reaches a threshold, over all folds."""
    tops = [scale.tops(_sums(fold.weights, some)) for fold in made]
    return float((np.concatenate(tops) >= threshold).mean())


def _sums(weights: Weights, some: Sequence[Reply]) -> list[Sums]:
    return [replies.sums(weights, [(reply, len(reply))]) for reply in some]


def _is_of(reply: Reply, origins: tuple[str, ...]) -> bool:
    return reply.row.source == "out_benign" and any(name in reply.row.group for name in origins)


def _is_gate(reply: Reply) -> bool:
    return reply.row.held_out and reply.row.kind == "output"


@dataclass(frozen=True, slots=True)
class Calibration:
    """How the sums become a logit of the probability, and what benign replies reach at each target."""

    scale: Scale
    thresholds: list[float]


def calibrated(texts: Sequence[Reply]) -> Calibration:
    """By weights that have not seen the benign replies they are held against."""
    made = folds(texts)
    scale = scale_of(made)
    no = np.concatenate([scale.tops(fold.heard) for fold in made])
    gate = [text for text in texts if _is_gate(text) and text.row.harmful]
    yes = np.concatenate([scale.tops(_sums(fold.weights, gate)) for fold in made])
    both = np.concatenate([no, yes])[:, None]
    platt = LogisticRegression(C=100.0, class_weight="balanced").fit(both, np.arange(len(both)) >= len(no))
    slope, offset = float(platt.coef_[0, 0]), float(platt.intercept_[0])
    reached = np.quantile(no, [1 - target for target in TARGETS]) * slope + offset
    (a, b), (c, d) = scale.whole, scale.window
    probable = Scale((a * slope, b * slope + offset), (c * slope, d * slope + offset))
    return Calibration(probable, [float(p) for p in 1 / (1 + np.exp(-reached))])


def topics(texts: Sequence[Reply]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """For each category its weights over fewer places, and its offset; for one without rows none at all."""
    known = [reply for reply in texts if reply.row.category in CATEGORIES[:-1] and not reply.row.held_out]
    features, _, _ = matrix(known, random.Random(_SEED), most=1)  # noqa: S311  (reproducible, not secret)
    few = 1 << CATEGORY_BITS
    folded = csr_matrix((features.data, features.indices % few, features.indptr), (len(known), few))
    model = LogisticRegression(C=3.0, max_iter=60, tol=1e-3)
    model.fit(folded, [reply.row.category for reply in known])
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
        whole=np.array(by.scale.whole),
        window=np.array(by.scale.window),
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
    parser.add_argument("--report", type=Path, help="where the figures go, as JSON")
    parser.add_argument("--models", type=Path, default=MODELS, help="where the model goes")
    given = parser.parse_args()
    every = [row for row in (*rows.public(given.data), *rows.own()) if row.harmful is not None]
    texts = [replies.read(row) for row in every if row.kind == "output" or row.own or row.source in PROMPTS]
    texts = [text for text in texts if len(text) > 2]
    by = calibrated(texts)
    save(given.models, fit([text for text in texts if not text.row.held_out]), by, topics(texts))
    print(json.dumps({"thresholds": dict(zip(TARGETS, by.thresholds, strict=True))}), flush=True)
    figures = []
    for source in LEFT_OUT:
        figures.append(left_out(texts, source))
        print(json.dumps(figures[-1]), flush=True)
    if given.report is not None:
        given.report.write_text(json.dumps({"left_out": figures}, indent=1) + "\n")


if __name__ == "__main__":
    main()
