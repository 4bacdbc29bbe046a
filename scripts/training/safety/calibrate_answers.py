"""From examined answers of sources left out to the thresholds of answers, by the worst kind of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from sklearn.linear_model import LogisticRegression

from app.safety.policies.policy_file import Rule
from scripts.training.safety.answer_folds import AnswerFold
from scripts.training.safety.examinations import Examined, Weights
from scripts.training.safety.rows import HALF

RATES = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1)
SLACK: Mapping[str, float] = {"ordinary": 1.0, "safe": 5.0, "fiction": 12.0, "refusal": 10.0}
"""How many times a rate may be reached by answers of a kind.

They are answers to ordinary tasks, answers to safe questions that sound unsafe, chapters of old novels of
murder and horror, and refusals. A rate of 0.2% means 1%, 2.4% and 2% of the last three. The refusals are
answers to jailbreaks, many of which half comply.
"""
GROUP_SLACK = 2.5
"""How far a source of ordinary answers may be above the rate of all."""
GROUP_REPLIES = 300
HEARD = 0.5
"""How much the logit of what was heard counts for one of the encoder's."""
PRIOR = 0.5
"""What a prompt of harm 1 adds to the logit of its answer. No public replies come with their prompts."""
_LEAST = -12.0


class AnswerBlend(NamedTuple):
    """The part of Blend that is about answers."""

    answer: float
    answer_heard: float
    answer_prior: float
    answer_bias: float
    answer_refusal: float


def kind_of(examined: Examined) -> str | None:
    """Of a harmless reply the kind of SLACK; None for one that is of none."""
    row = examined.row
    if row.harmful:
        return None
    if row.source == "out_gptfuzz":
        return "refusal" if examined.refuses else None
    if row.source == "out_diasafety":
        return None
    if row.source.startswith("benign_fiction"):
        return "fiction"
    if row.near or "noncompliance" in row.group:
        return "safe"
    return "ordinary"


def weights(folds: Sequence[AnswerFold]) -> Weights:
    """What an answer that opens with a refusal is let off.

    So much that as many refusals as SLACK says are halted at the threshold that the other kinds ask for.
    """
    rate, alike = Rule().answer_fpr, Weights(HEARD, refusal=0.0)
    by_kind = _by_kind([each for fold in folds for each in fold.plain])
    at = {kind: _quantile(_highest(some, alike), 1 - SLACK[kind] * rate) for kind, some in by_kind.items()}
    return alike._replace(refusal=max(0.0, at.pop("refusal", _LEAST) - max(at.values(), default=_LEAST)))


def _by_kind(replies: Sequence[Examined]) -> dict[str, list[Examined]]:
    by_kind = {kind: [reply for reply in replies if kind_of(reply) == kind] for kind in SLACK}
    return {kind: some for kind, some in by_kind.items() if some}


def blend(folds: Sequence[AnswerFold], counts: Weights) -> AnswerBlend:
    """The line from the encoder's logit to a probability, of replies that were examined at all."""
    seen = [each for fold in folds for each in fold.plain if each.findings]
    logits = np.array([each.highest(counts) for each in seen])[:, None]
    model = LogisticRegression(C=100.0, class_weight="balanced").fit(
        logits, [bool(each.row.harmful) for each in seen]
    )
    slope = float(model.coef_[0, 0])
    return AnswerBlend(slope, HEARD * slope, PRIOR, float(model.intercept_[0]), counts.refusal * slope)


def logits_at(folds: Sequence[AnswerFold], counts: Weights, rates: Sequence[float] = RATES) -> list[float]:
    """For each rate the encoder's logit that this share of harmless replies reaches; see SLACK."""
    by_kind = _by_kind([each for fold in folds for each in fold.plain])
    ordinary = by_kind.get("ordinary", [])
    parts = [(_highest(some, counts), SLACK[kind]) for kind, some in by_kind.items()]
    for group in sorted({_group(reply) for reply in ordinary}):
        some = [reply for reply in ordinary if _group(reply) == group]
        if len(some) >= GROUP_REPLIES:
            parts.append((_highest(some, counts), GROUP_SLACK))
    at = [max(_quantile(reached, 1 - min(slack * rate, 0.5)) for reached, slack in parts) for rate in rates]
    return [float(value) for value in np.maximum.accumulate(at[::-1])[::-1]]


def _quantile(reached: NDArray[np.float64], share: float) -> float:
    return max(_LEAST, float(np.quantile(reached, share, method="higher")))


def _highest(replies: Sequence[Examined], counts: Weights) -> NDArray[np.float64]:
    return np.array([max(each.highest(counts), _LEAST) for each in replies])


def _group(examined: Examined) -> str:
    origin = examined.row.group.split(":")[0] if examined.row.source == "out_benign" else ""
    return f"{examined.row.source.replace(HALF, '')} {origin}".strip()


def table(folds: Sequence[AnswerFold], counts: Weights, line: AnswerBlend) -> dict[str, list[float]]:
    """A category's row of calibration.json's `output`."""
    logits = np.array(logits_at(folds, counts)) * line.answer + line.answer_bias
    harms = 1.0 / (1.0 + np.exp(-logits))
    return {"fpr": list(RATES), "threshold": [round(float(harm), 5) for harm in harms]}


def figures(folds: Sequence[AnswerFold], rate: float, watched_rate: float) -> dict[str, Any]:
    """What the stream screen halts at two rates: answers to prompts that nobody watches, and to watched."""
    counts = weights(folds)
    at, watched_at = logits_at(folds, counts, (rate, watched_rate))
    plain = [each for fold in folds for each in fold.plain]
    watched = [each for fold in folds for each in fold.watched]
    return {
        "answers": _by_group(plain, at, counts),
        "watched answers": _by_group(watched, watched_at, counts),
        "examined": round(float(np.mean([bool(r.findings) for r in plain if kind_of(r) == "ordinary"])), 4),
    }


def _by_group(replies: Sequence[Examined], at: float, counts: Weights) -> dict[str, Any]:
    result: dict[str, Any] = {}
    names = sorted({_name(reply) for reply in replies})
    for name in names:
        some = [reply for reply in replies if _name(reply) == name]
        halts = [reply.halted_at(at, counts) for reply in some]
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
