"""Answers as they are screened: heard token by token, and examined by the encoder where they are suspect.

A reply of a source that was left out of training is heard to its end by a model that has not seen it.
Wherever the stream screen would have it examined, the encoder reads the end of it. What it says there decides
which threshold would have halted the reply, and after how many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.safety.classifiers.classifier import refuses
from app.safety.classifiers.encoder import ANSWER, WINDOW
from app.safety.text.normalize import normalize
from app.safety.thresholds import (
    HITS_TO_REVIEW,
    OPENING_CHARS,
    RECHECK_GROWTH,
    RECHECK_LOGIT_STEP,
    REVIEWED_CHARS,
    WATCHED_HOLDBACK,
)
from scripts.training.safety import replies, train_encoder
from scripts.training.safety.minilm import MiniLM
from scripts.training.safety.replies import Reply
from scripts.training.safety.rows import Row
from scripts.training.safety.tokens import Wordpieces

HEARD_BOUND = 20.7
"""The logit of the nearest to certainty that the classifier takes for what was heard."""


@dataclass(frozen=True, slots=True)
class Listener:
    """The model that hears every token: weights, the sum at which an answer is suspect, and its line."""

    weights: NDArray[np.float32]
    drift: float
    suspect_at: float
    line: tuple[float, float]

    def logit(self, total: float) -> float:
        """What it says of a sum."""
        return self.line[0] * total + self.line[1]


class Finding(NamedTuple):
    """One examination: after which token, what the encoder says, and what the listener had heard by then."""

    at_tokens: int
    encoded: float
    heard: float


class Weights(NamedTuple):
    """What counts beside the encoder's logit: what was heard, and a refusal at the beginning."""

    heard: float
    refusal: float

    def logit(self, finding: Finding) -> float:
        """Of one examination, without the refusal; what was heard is bounded as the classifier bounds it."""
        return finding.encoded + self.heard * float(np.clip(finding.heard, -HEARD_BOUND, HEARD_BOUND))


@dataclass(frozen=True, slots=True)
class Examined:
    """A reply, and its examinations, if each found it harmless."""

    row: Row
    num_tokens: int
    findings: Sequence[Finding]

    @property
    def refuses(self) -> bool:
        """Whether the reply opens with a refusal."""
        return refuses(self.row.text[:OPENING_CHARS])

    def highest(self, weights: Weights) -> float:
        """The highest logit of all examinations; minus infinity where the reply was never examined."""
        return max((weights.logit(finding) for finding in self.findings), default=-np.inf) - self._off(
            weights
        )

    def halted_at(self, logit: float, weights: Weights) -> int | None:
        """The token at which a threshold would have halted the reply; None if it would not."""
        least = logit + self._off(weights)
        return next((finding.at_tokens for finding in self.findings if weights.logit(finding) >= least), None)

    def _off(self, weights: Weights) -> float:
        return weights.refusal if self.refuses else 0.0


def points(reply: Reply, listener: Listener, *, watched: bool) -> list[tuple[int, float]]:
    """The tokens after which a reply is examined if each finds it harmless, and what is heard by then."""
    sums = replies.sums(listener.weights, listener.drift, [(reply, len(reply))])
    step = RECHECK_LOGIT_STEP / listener.line[0]
    level, hits = listener.suspect_at, 0
    at: dict[int, float] = {}
    due = _watched_points(len(reply)) if watched else set()
    for number, total in enumerate(sums, start=1):
        if total < listener.suspect_at:
            level = listener.suspect_at
        hits = hits + 1 if total >= level else 0
        if hits >= HITS_TO_REVIEW or number in due:
            at[number] = listener.logit(float(total))
        if hits >= HITS_TO_REVIEW:
            level, hits = float(total) + step, 0
    return sorted(at.items())


def _watched_points(length: int) -> set[int]:
    due = {length}
    at = WATCHED_HOLDBACK.base
    while at < length:
        due.add(at)
        at *= RECHECK_GROWTH
    return due


def examine(
    heard: Sequence[Reply], listener: Listener, model: MiniLM, wordpieces: Wordpieces, *, watched: bool
) -> list[Examined]:
    """Hear replies to their ends, and examine them wherever they are suspect."""
    where = [points(reply, listener, watched=watched) for reply in heard]
    pieces = [
        ending(reply, at, wordpieces) for reply, some in zip(heard, where, strict=True) for at, _ in some
    ]
    encoded = iter(train_encoder.logits(model, pieces)[:, ANSWER] if pieces else ())
    return [
        Examined(reply.row, len(reply), [Finding(at, float(next(encoded)), logit) for at, logit in some])
        for reply, some in zip(heard, where, strict=True)
    ]


def ending(reply: Reply, tokens: int, wordpieces: Wordpieces) -> list[int]:
    """What the encoder reads of a reply's first so many tokens: the end of them."""
    text = "".join(replies.tokens(reply.row.text)[:tokens])[-REVIEWED_CHARS:]
    return wordpieces.ids(normalize(text))[-(WINDOW - 2) :]
