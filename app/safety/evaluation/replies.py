"""How soon the stream screen halts harmful replies, and how often benign ones: labelled replies, streamed.

A reply is fed word by word, a word a token, as an engine would hand it over, and nothing of its prompt is
known. Its score is the highest that two tokens in a row reached, for one alone halts nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from app.core import Counts, Delta, FinishReason
from app.safety.evaluation.prompts import Judged, Row, quantiles
from app.safety.policies.policy import Policy
from app.safety.screens.stream_screen import StreamScreen
from app.safety.screens.stream_terms import Listener, Listens
from app.safety.verdict import Action, Scores

_WORDS = re.compile(r"\s*\S+|\s+")


class Streamed(NamedTuple):
    """A reply that was streamed: at which token it was halted, if it was, and how many had gone out."""

    judged: Judged
    halted_at: int | None
    released_tokens: int


class _Noted:
    """A listener whose highest score of two in a row is kept."""

    def __init__(self, listener: Listener) -> None:
        self.highest = 0.0
        self._listener = listener
        self._last = 0.0

    def feed(self, text: str) -> float:
        """See Listener."""
        p = self._listener.feed(text)
        self.highest = max(self.highest, min(p, self._last))
        self._last = p
        return p

    def scores(self) -> Scores:
        """See Listener."""
        return self._listener.scores()


class NotedModel:
    """A model of answers that says how high the last answer came."""

    def __init__(self, model: Listens) -> None:
        self._model = model
        self._heard: list[_Noted] = []

    def listen(self, prior: float) -> _Noted:
        """See Listens."""
        self._heard.append(_Noted(self._model.listen(prior)))
        return self._heard[-1]

    def hear(self, text: str) -> None:
        """Go on with the last answer."""
        self._heard[-1].feed(text)

    def take(self) -> float:
        """The highest score since this was last asked."""
        highest = max((noted.highest for noted in self._heard), default=0.0)
        self._heard.clear()
        return highest


def stream(model: NotedModel, policy: Policy, row: Row, *, watched: bool) -> Streamed:
    """Feed a reply to a screen of its own; what is left after a halt only to the model, for its score."""
    screening = StreamScreen(model).for_request(1, watched, 0.0, policy)
    words = _WORDS.findall(row.text)
    halted_at, released, taken_s = None, 0, 0.0
    for number, word in enumerate(words, start=1):
        if halted_at is not None:
            model.hear(word)
            continue
        finish: FinishReason | None = "stop" if number == len(words) else None
        delta = Delta(0, "text", word, (number,), Counts(1, number), finish)
        began_s = time.perf_counter()
        out = screening.feed(delta)
        taken_s += time.perf_counter() - began_s
        released += sum(len(each.token_ids) for each in out)
        if screening.halted is not None:
            halted_at = number
    action: Action | None = None if halted_at is None else "block"
    token_ms = 1000 * taken_s / max(halted_at or len(words), 1)
    judged = Judged(row, model.take(), action, token_ms, 1000 * taken_s)
    return Streamed(judged, halted_at, released)


def halts(streamed: Sequence[Streamed]) -> dict[str, Any]:
    """Of the harmful replies that were halted: after how many tokens, and how many of them had gone out."""
    halted = [each for each in streamed if each.judged.row.harmful and each.halted_at is not None]
    return {
        "halted_at_tokens": quantiles([float(each.halted_at or 0) for each in halted]),
        "released_tokens": quantiles([float(each.released_tokens) for each in halted]),
    }
