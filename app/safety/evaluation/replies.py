"""The stream screen on labelled replies: when it halts harmful ones, and how often benign ones.

A reply is fed word by word, a word a token, as an engine would hand it over, and nothing of its prompt is
known. Its score is the highest of its reviews; 0 if there was none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from app.core import Counts, Delta, FinishReason
from app.safety.classifiers.bundled_models import Models
from app.safety.evaluation.prompts import Judged, Row, quantiles
from app.safety.policies.policy import Policy
from app.safety.stream.answer_review import ReviewRequest
from app.safety.stream.stream_screen import StreamScreen
from app.safety.verdict import Action, Scores, harm

_WORDS = re.compile(r"\s*\S+|\s+")


class Streamed(NamedTuple):
    """A reply that was streamed: at which token it was halted, if it was, and how many had gone out."""

    judged: Judged
    halted_at: int | None
    released_tokens: int


async def stream(models: Models, policy: Policy, row: Row, *, watched: bool) -> Streamed:
    """Feed a reply to a screen of its own, to its end or to where it is halted. Raises ScreenFailed."""
    harms: list[float] = []

    async def review(request: ReviewRequest, _owner: str) -> Scores:
        scores = models.reviewer.answer(*request)
        harms.append(harm(scores))
        return scores

    screen = StreamScreen(models.answers, review)
    screening = screen.for_request(1, watched, 0.0, policy)
    words = _WORDS.findall(row.text)
    halted_at, released, taken_s = None, 0, 0.0
    for number, word in enumerate(words, start=1):
        finish: FinishReason | None = "stop" if number == len(words) else None
        delta = Delta(0, "text", word, (number,), Counts(1, number), finish)
        began_s = time.perf_counter()
        out = screening.feed(delta)
        taken_s += time.perf_counter() - began_s
        if screening.in_review:
            out = await screening.review()
        released += sum(len(each.token_ids) for each in out)
        if screening.halted is not None:
            halted_at = number
            harms.append(screening.halted.harm)
            break
    action: Action | None = None if halted_at is None else "block"
    token_ms = 1000 * taken_s / max(halted_at or len(words), 1)
    judged = Judged(row, max(harms, default=0.0), action, token_ms, 1000 * taken_s)
    return Streamed(judged, halted_at, released)


def halts(streamed: Sequence[Streamed]) -> dict[str, Any]:
    """Of the harmful replies that were halted: after how many tokens, and how many of them had gone out."""
    halted = [each for each in streamed if each.judged.row.harmful and each.halted_at is not None]
    return {
        "halted_at_tokens": quantiles([float(each.halted_at or 0) for each in halted]),
        "released_tokens": quantiles([float(each.released_tokens) for each in halted]),
    }
