"""Answers as they are screened: heard token by token, and examined by the encoder where they are suspect.

A reply of a source that was left out of training is heard to its end by a model that has not seen it.
Wherever the stream screen would have it examined, the encoder reads the end of it. What it says there decides
which threshold would have halted the reply, and after how many tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from app.safety.classifiers.encoder import ANSWER, WINDOW
from app.safety.screens.choice_screen import EXAMINED_AGAIN, EXAMINED_CHARS, HITS
from app.safety.screens.stream_terms import HoldBack
from app.safety.text.normalize import normalize
from scripts.training.safety import replies, train_encoder
from scripts.training.safety.minilm import MiniLM
from scripts.training.safety.replies import Reply
from scripts.training.safety.rows import Row
from scripts.training.safety.tokens import Wordpieces

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Listener:
    """The weights of the model that hears every token, and its sum at which an answer is suspect."""

    weights: NDArray[np.float32]
    drift: float
    suspect_at: float


@dataclass(frozen=True, slots=True)
class Examined:
    """A reply, and the tokens after which it was examined, with the logit of harm that each found."""

    row: Row
    num_tokens: int
    at_tokens: Sequence[int]
    logits: Sequence[float]

    @property
    def highest(self) -> float:
        """The highest logit of all; minus infinity where the reply was never examined."""
        return max(self.logits, default=-np.inf)

    def halted_at(self, logit: float) -> int | None:
        """The token at which a threshold would have halted the reply; None if it would not."""
        return next(
            (at for at, found in zip(self.at_tokens, self.logits, strict=True) if found >= logit), None
        )


def points(reply: Reply, listener: Listener, *, watched: bool) -> list[int]:
    """The tokens after which a reply is examined if each examination finds it harmless."""
    due = _watched_points(len(reply)) if watched else set()
    at_tokens = []
    start = 0
    while start < len(reply):
        scores = _sums(reply, listener, start)
        hit = _first_hit(scores, listener.suspect_at)
        end = len(reply) if hit is None else start + hit + 1
        at_tokens += [token for token in sorted(due) if start < token < end]
        if hit is None:
            break
        at_tokens.append(end)
        start = end
    if watched and (not at_tokens or at_tokens[-1] < len(reply)):
        at_tokens.append(len(reply))
    return sorted(set(at_tokens))


def _watched_points(length: int) -> set[int]:
    due: set[int] = set()
    at = HoldBack().watched
    while at < length:
        due.add(at)
        at *= EXAMINED_AGAIN
    return due


def _sums(reply: Reply, listener: Listener, start: int) -> Floats:
    """The sum after each token from `start` on, which begins at nothing there."""
    first = reply.ends[start - 1] if start else 0
    part = Reply(reply.row, reply.places[first:], reply.ends[start:] - first)
    return replies.sums(listener.weights, listener.drift, [(part, len(part))])


def _first_hit(scores: Floats, threshold: float) -> int | None:
    hits = scores >= threshold
    for _ in range(1, HITS):
        hits = hits[1:] & hits[:-1]
    found = np.flatnonzero(hits)
    return int(found[0]) + HITS - 1 if len(found) else None


def examine(
    heard: Sequence[Reply], listener: Listener, model: MiniLM, wordpieces: Wordpieces, *, watched: bool
) -> list[Examined]:
    """Hear replies to their ends, and examine them wherever they are suspect."""
    where = [points(reply, listener, watched=watched) for reply in heard]
    pieces = [
        ending(reply, at, wordpieces)
        for reply, at_tokens in zip(heard, where, strict=True)
        for at in at_tokens
    ]
    found = train_encoder.logits(model, pieces)[:, ANSWER] if pieces else np.zeros(0, np.float32)
    result, start = [], 0
    for reply, at_tokens in zip(heard, where, strict=True):
        logits = [float(logit) for logit in found[start : start + len(at_tokens)]]
        result.append(Examined(reply.row, len(reply), at_tokens, logits))
        start += len(at_tokens)
    return result


def ending(reply: Reply, tokens: int, wordpieces: Wordpieces) -> list[int]:
    """What the encoder reads of a reply's first so many tokens: the end of them."""
    text = "".join(replies.tokens(reply.row.text)[:tokens])[-EXAMINED_CHARS:]
    return wordpieces.ids(normalize(text))[-(WINDOW - 2) :]
