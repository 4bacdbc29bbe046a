"""Why a text is judged as it is: the sentences that decide, the scores, the words, and what policies do.

The span that decides is the smallest run of sentences without which the verdict is milder. To look at every
run by the encoder would take minutes; so the n-grams rank the runs of a length, and the screen reads the text
without the best few. The work is bounded whatever the text is. Keeps and logs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from app.safety.categories import CATEGORIES, name_of
from app.safety.classifiers.bundled_models import Models
from app.safety.evaluation.traffic import policies
from app.safety.policies.policy import Policy
from app.safety.screens.prompt_screen import PromptScreen
from app.safety.text.turns import slices
from app.safety.verdict import ACTIONS, Action, Scores, Verdict, highest, judged, stricter

MAX_CHARS = 20_000
"""Characters of a text that is explained."""
MAX_PIECES = 40
"""Sentences; where there are more, neighbours count as one."""
LEVELS = 3
"""How often the sentences of neighbours that decide are looked at one by one."""
MAX_PIECES_OF_LONG = 24
"""The same of a text over LONG_CHARS, each look at which takes the n-grams several milliseconds."""
LONG_CHARS = 4_000
TRIES = 3
"""Runs of a length that the screen reads the text without."""
WORDS = 10
"""Words that are named."""
_SENTENCE_END = re.compile(r"(?<=[.!?\u2026])\s+|(?<=[\u3002\uff01\uff1f])\s*|\s*\n\s*")


class Span(NamedTuple):
    """A run of characters of the text, from `start` to `end`."""

    start: int
    end: int


class Explanation(NamedTuple):
    """The verdict of the enforced policy on a text, and what it comes from."""

    verdict: Verdict
    ngrams: Scores
    full: Scores
    span: Span | None
    """The sentences that decide; None where nothing was decided."""
    words: Sequence[tuple[str, float]]
    """The words that add most to the n-grams' logit of harm, and how much."""
    policies: Mapping[str, Action | None]
    """What each policy does about the text as a prompt."""
    num_read: int
    """How many texts the screen has read for this."""


async def explain(text: str, policy: Policy, screen: PromptScreen, models: Models) -> Explanation:
    """Explain a text as a prompt under a policy, enforced. Raises ValueError for one of over MAX_CHARS."""
    if len(text) > MAX_CHARS:
        raise ValueError(f"the text has {len(text):,} characters, and at most {MAX_CHARS:,} are explained")
    judge = _Judge(policy.enforced, screen)
    verdict = await judge(text)
    ngrams, full = (
        highest(*(r.scores for r in verdict.readings if r.stage == stage)) for stage in ("ngrams", "encoder")
    )
    span = None
    if verdict.action is not None:
        span = await _deciding(text, verdict, judge, lambda rest: _ngram_harm(rest, models))
    compared = {name: judged(each, verdict.readings).action for name, each in policies(policy).items()}
    return Explanation(
        verdict=verdict,
        ngrams=ngrams,
        full=full,
        span=span,
        words=[(words, logit) for words, logit in models.evidence(text)[:WORDS] if logit > 0],
        policies=compared,
        num_read=judge.num_read,
    )


def sentences(text: str) -> list[Span]:
    """The sentences of a text in order, white space around them left out."""
    edges = [0, *(m.end() for m in _SENTENCE_END.finditer(text)), len(text)]
    spans = [_stripped(text, Span(*pair)) for pair in pairwise(edges)]
    return [span for span in spans if span.start < span.end]


def joined(spans: Sequence[Span], limit: int) -> list[Span]:
    """At most `limit` spans, of neighbours joined."""
    spans = list(spans)
    while len(spans) > limit:  # join the two neighbours that are shortest together
        at = min(range(len(spans) - 1), key=lambda i: spans[i + 1].end - spans[i].start)
        spans[at : at + 2] = [Span(spans[at].start, spans[at + 1].end)]
    return spans


def as_json(text: str, explanation: Explanation, policy: Policy) -> dict[str, Any]:
    """The explanation as `tokenring safety explain --json` prints it."""
    verdict, span = explanation.verdict, explanation.span
    return {
        "object": "safety.explanation",
        "action": verdict.action,
        "category": verdict.category,
        "category_name": verdict.category and name_of(verdict.category),
        "score": round(verdict.score, 4),
        "threshold": round(verdict.threshold, 4),
        "stage": verdict.stage,
        "policy_hash": policy.hash,
        "span": span and {"start": span.start, "end": span.end, "text": text[span.start : span.end]},
        "scores": {
            c: {
                "name": name_of(c),
                "ngrams": round(explanation.ngrams.get(c, 0.0), 4),
                "full": round(explanation.full.get(c, 0.0), 4),
            }
            for c in CATEGORIES
        },
        "words": [{"words": words, "logit": round(logit, 3)} for words, logit in explanation.words],
        "policies": dict(explanation.policies),
    }


class _Judge:
    """The verdict on a text, and how many were asked for."""

    def __init__(self, policy: Policy, screen: PromptScreen) -> None:
        self._policy = policy
        self._screen = screen
        self.num_read = 0

    async def __call__(self, text: str) -> Verdict:
        self.num_read += 1
        conversation = [{"role": "user", "content": text}]
        first = self._screen.ngram_verdict(conversation, self._policy)
        return stricter(first, await self._screen.full_verdict(conversation, self._policy))


async def _deciding(text: str, verdict: Verdict, judge: _Judge, harm_of: Callable[[str], float]) -> Span:
    """The smallest run of sentences without which the verdict is milder; at worst all of them.

    Where neighbours were joined, their sentences are tried in turn.
    """
    within = Span(0, len(text))
    limit = MAX_PIECES if len(text) <= LONG_CHARS else MAX_PIECES_OF_LONG
    for _ in range(LEVELS):
        single = [span for span in sentences(text) if span.start >= within.start and span.end <= within.end]
        spans = joined(single, limit)
        within = await _smallest_run(text, spans, verdict, judge, harm_of)
        if len(spans) == len(single):
            break
    return within


async def _smallest_run(
    text: str, spans: Sequence[Span], verdict: Verdict, judge: _Judge, harm_of: Callable[[str], float]
) -> Span:
    for length in range(1, len(spans)):
        runs = [Span(spans[i].start, spans[i + length - 1].end) for i in range(len(spans) - length + 1)]
        ranked = sorted(runs, key=lambda run: harm_of(_without(text, run)))
        milder = []
        for run in ranked[:TRIES]:
            rest = await judge(_without(text, run))
            if _severity(rest) < _severity(verdict):
                milder.append((rest.harm, run))
        if milder:
            return min(milder)[1]
    return Span(spans[0].start, spans[-1].end) if spans else Span(0, len(text))


def _without(text: str, span: Span) -> str:
    """The text with white space there, so that the slices of a long text stay where they are."""
    return text[: span.start] + " " * (span.end - span.start) + text[span.end :]


def _severity(verdict: Verdict) -> int:
    return 0 if verdict.action is None else len(ACTIONS) - ACTIONS.index(verdict.action)


def _ngram_harm(text: str, models: Models) -> float:
    return max(models.prompts.fast(piece).harm for piece in slices(text))


def _stripped(text: str, span: Span) -> Span:
    piece = text[span.start : span.end]
    start = span.start + len(piece) - len(piece.lstrip())
    return Span(start, max(start, span.start + len(piece.rstrip())))
