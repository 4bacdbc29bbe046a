"""From examined answers of sources left out to the thresholds of answers, by the worst kind of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from scripts.training.safety.answer_folds import AnswerFold
from scripts.training.safety.examinations import Examined
from scripts.training.safety.rows import HALF

RATES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
SLACK: Mapping[str, float] = {"ordinary": 1.0, "safe": 5.0, "fiction": 12.0, "refusal": 30.0}
"""How many times a rate may be reached by answers of a kind.

They are answers to ordinary tasks, answers to safe questions that sound unsafe, chapters of old novels of
murder and horror, and refusals. A rate of 0.2% means 1%, 2.4% and 6% of the last three. No fiction at all was
trained on in the fold that has it, and the refusals are answers to jailbreaks, many of which half comply.
"""
GROUP_SLACK = 2.5
"""How far a source of ordinary answers may be above the rate of all."""
GROUP_REPLIES = 300
HEARD = 0.5
"""How much the logit of what was heard counts for one of the encoder's."""
PRIOR = 0.5
"""What a prompt of harm 1 adds to the logit of its answer. No public replies come with their prompts."""
_LEAST = -12.0
_REFUSES = re.compile(
    r"\b(sorry|apolog|i can(no|')?t|i (am|'m) (not able|unable)|cannot (help|assist|provide|fulfil)|as an ai"
    r"|not (appropriate|able to)|against my|won't (help|provide))",
    re.IGNORECASE,
)
_REFUSAL_CHARS = 250


class AnswerBlend(NamedTuple):
    """The part of Blend that is about answers."""

    answer: float
    answer_heard: float
    answer_prior: float
    answer_bias: float


def kind_of(examined: Examined) -> str | None:
    """Of a harmless reply the kind of SLACK; None for one that is of none."""
    row = examined.row
    if row.harmful:
        return None
    if row.source == "out_gptfuzz":
        return "refusal" if _REFUSES.search(row.text[:_REFUSAL_CHARS]) else None
    if row.source == "out_diasafety":
        return None
    if row.source.startswith("benign_fiction"):
        return "fiction"
    if row.near or "noncompliance" in row.group:
        return "safe"
    return "ordinary"


def blend(folds: Sequence[AnswerFold]) -> AnswerBlend:
    """The line from the encoder's logit to a probability, of replies that were examined at all."""
    seen = [each for fold in folds for each in fold.plain if each.findings]
    logits = np.array([each.highest(HEARD) for each in seen])[:, None]
    model = LogisticRegression(C=100.0, class_weight="balanced").fit(
        logits, [bool(each.row.harmful) for each in seen]
    )
    slope = float(model.coef_[0, 0])
    return AnswerBlend(slope, HEARD * slope, PRIOR, float(model.intercept_[0]))


def logits_at(folds: Sequence[AnswerFold], rates: Sequence[float] = RATES) -> list[float]:
    """For each rate the encoder's logit that this share of harmless replies reaches; see SLACK."""
    replies = [each for fold in folds for each in fold.plain]
    by_kind = {kind: [r for r in replies if kind_of(r) == kind] for kind in SLACK}
    ordinary = by_kind["ordinary"]
    parts = [(_highest(some), SLACK[kind]) for kind, some in by_kind.items() if some]
    for group in sorted({_group(reply) for reply in ordinary}):
        some = [reply for reply in ordinary if _group(reply) == group]
        if len(some) >= GROUP_REPLIES:
            parts.append((_highest(some), GROUP_SLACK))
    at = [max(_quantile(reached, 1 - min(slack * rate, 0.5)) for reached, slack in parts) for rate in rates]
    return [float(value) for value in np.maximum.accumulate(at[::-1])[::-1]]


def _quantile(reached: NDArray[np.float64], share: float) -> float:
    return max(_LEAST, float(np.quantile(reached, share, method="higher")))


def _highest(replies: Sequence[Examined]) -> NDArray[np.float64]:
    return np.array([max(each.highest(HEARD), _LEAST) for each in replies])


def _group(examined: Examined) -> str:
    origin = examined.row.group.split(":")[0] if examined.row.source == "out_benign" else ""
    return f"{examined.row.source.replace(HALF, '')} {origin}".strip()


def table(folds: Sequence[AnswerFold], line: AnswerBlend) -> dict[str, list[float]]:
    """A category's row of calibration.json's `output`."""
    logits = np.array(logits_at(folds)) * line.answer + line.answer_bias
    harms = 1.0 / (1.0 + np.exp(-logits))
    return {"fpr": list(RATES), "threshold": [round(float(harm), 5) for harm in harms]}


def figures(folds: Sequence[AnswerFold], rate: float, watched_rate: float) -> dict[str, Any]:
    """What the stream screen halts at two rates: answers to prompts that nobody watches, and to watched."""
    at, watched_at = logits_at(folds, (rate, watched_rate))
    plain = [each for fold in folds for each in fold.plain]
    watched = [each for fold in folds for each in fold.watched]
    return {
        "answers": _by_group(plain, at),
        "watched answers": _by_group(watched, watched_at),
        "examined": round(float(np.mean([bool(r.findings) for r in plain if kind_of(r) == "ordinary"])), 4),
    }


def _by_group(replies: Sequence[Examined], at: float) -> dict[str, Any]:
    result: dict[str, Any] = {}
    names = sorted({_name(reply) for reply in replies})
    for name in names:
        some = [reply for reply in replies if _name(reply) == name]
        halts = [reply.halted_at(at, HEARD) for reply in some]
        after = [token for token in halts if token is not None]
        result[name] = [
            len(some),
            round(len(after) / len(some), 4),
            *([int(np.quantile(after, q)) for q in (0.25, 0.5, 0.9)] if after else []),
        ]
    return result


def _name(examined: Examined) -> str:
    kind = "harmful" if examined.row.harmful else kind_of(examined) or "benign, unclear"
    return f"{_group(examined)}: {kind}"
