"""When an answer is reviewed by the second-stage classifier, and how much of it is held until then.

The first stage scores every token, is cheap and often wrong, and halts nothing by itself:

    score below the doubt   the base hold-back
    in doubt                the hold-back grows with the score, up to its maximum
    two hits in a row       a review; nothing is released before its verdict

An answer that was found harmless is reviewed again once its score has clearly risen. The answer to a watched
prompt is reviewed after its first tokens too, each time that it has doubled, and at its end.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Awaitable, Callable
from typing import NamedTuple, Protocol

from app.core import Channel
from app.safety.policies.policy import Policy
from app.safety.thresholds import (
    HITS_TO_REVIEW,
    HOLDBACK,
    OPENING_CHARS,
    RECHECK_GROWTH,
    RECHECK_LOGIT_STEP,
    RECHECK_MIN_TOKENS,
    REVIEWED_CHARS,
    SUSPICION_RATIO,
    WATCHED_HOLDBACK,
)
from app.safety.verdict import Scores, Verdict, harm


class ScoredAnswer(Protocol):
    """An answer that is scored while it grows (app.safety.classifiers.output_model)."""

    def feed(self, text: str) -> float:
        """The harm of the answer, 0 to 1, after this text."""
        ...


class AnswerClassifier(Protocol):
    """The first-stage classifier of answers."""

    review_at: float
    """The harm from which an answer is to be reviewed."""

    def start(self, prompt_harm: float) -> ScoredAnswer:
        """A new answer, to a prompt of this harm."""
        ...


class ReviewRequest(NamedTuple):
    """The input of the second stage: the end of an answer, its opening, and two harms."""

    text: str
    prompt_harm: float
    """The harm of the prompt."""
    running_score: float = 0.0
    """The harm of the whole answer by the first stage."""
    opening: str = ""


Review = Callable[[ReviewRequest, str], Awaitable[Scores]]
"""The scores of the second stage for an owner's answer (app.safety.stream.answer_encoder).

Raises ScreenFailed.
"""


_PIECES = 16
"""Texts that are joined at once: most answers are never reviewed, and many short texts take more memory."""


class Excerpt:
    """The beginning and the end of a growing text. Reasoning does not count as its beginning."""

    __slots__ = ("_joined", "_pieces", "_reasoning_chars", "opening")

    def __init__(self) -> None:
        self.opening = ""
        self._joined = ""
        self._pieces: list[str] = []
        self._reasoning_chars = 0
        """Characters of the next text that are reasoning."""

    def switch_channel(self, channel: Channel, num_unread: int) -> None:
        """Note that the text after `num_unread` characters is of this channel.

        A model that doubts in its reasoning may comply in its answer.
        """
        unread = min(self._reasoning_chars, num_unread)
        self._reasoning_chars = sys.maxsize if channel == "reasoning" else unread

    def add(self, text: str) -> None:
        """Append a text."""
        if len(self.opening) < OPENING_CHARS:
            self.opening = (self.opening + text[self._reasoning_chars :])[:OPENING_CHARS]
        if self._reasoning_chars:
            self._reasoning_chars = max(0, self._reasoning_chars - len(text))
        self._pieces.append(text)
        if len(self._pieces) == _PIECES:
            self._joined, self._pieces = self.ending, []

    @property
    def ending(self) -> str:
        """The last REVIEWED_CHARS."""
        return (self._joined + "".join(self._pieces))[-REVIEWED_CHARS:]


class ChoiceDoubt:
    """The doubt about one choice: its scores by both stages, the hold-back and the reviews that follow.

    Positions are in tokens from 1.
    """

    def __init__(
        self, classifier: AnswerClassifier, policy: Policy, prompt_harm: float, *, watched: bool
    ) -> None:
        self._feed = classifier.start(prompt_harm).feed
        self._policy = policy
        self._prompt_harm = prompt_harm
        self._watched = watched
        self._review_at = self._recheck_at = classifier.review_at
        self._doubt_at = SUSPICION_RATIO * classifier.review_at
        self._holdback = WATCHED_HOLDBACK if watched else HOLDBACK
        self.holdback_tokens = self._holdback.base
        """The number of tokens that are to be held back now."""
        self._due_at_tokens = float(self._holdback.base) if watched else math.inf
        self._reviewed_tokens = 0
        self._score = 0.0
        self._hits = 0
        self.in_doubt = False
        self.read_tokens = 0
        self.clean_until = 0
        """The last token that left the first stage in no doubt."""
        self.hit_at = 0
        """The first token of the hits that led to the review."""
        self.findings: Scores = {}
        """The highest scores that a review gave."""
        self.excerpt = Excerpt()

    def read(self, text: str, tokens: int) -> bool:
        """Score the answer up to token `tokens`; returns True if it is to be reviewed now."""
        first, self.read_tokens = self.read_tokens + 1, tokens
        if not text:
            return False
        self.excerpt.add(text)
        score = self._score = self._feed(text)
        if score < self._review_at:
            self._hits, self._recheck_at = 0, self._review_at
            if not self._watched:
                self._due_at_tokens = math.inf
        if score < self._doubt_at:
            self._set_clean(tokens)
        elif self._review_at <= score < self._recheck_at:  # reviewed already, and hardly higher since
            self._hits = 0
            self._set_clean(tokens)
        else:
            self._raise_holdback(score, first, tokens)
        return self._hits >= HITS_TO_REVIEW or tokens >= self._due_at_tokens

    def _raise_holdback(self, score: float, first: int, tokens: int) -> None:
        """Hold more back. If the score reaches the review threshold or is NaN, each token counts as a hit."""
        self.in_doubt = True
        self.clean_until = min(self.clean_until, tokens - 1)  # an earlier delta may be of the same token
        base, self.holdback_tokens = self._holdback
        if score < self._review_at:
            range_tokens = self.holdback_tokens - base
            doubt, review = self._doubt_at, self._review_at
            self.holdback_tokens = base + int(range_tokens * (score - doubt) / (review - doubt))
            return
        self.hit_at = self.hit_at if self._hits else first
        self._hits += max(1, tokens - first + 1)

    def hit_span(self, tokens: int, *, clean_until: int) -> None:
        """Note that token `tokens` completes a span of the hard list."""
        self.hit_at, self.clean_until = tokens, clean_until

    def is_due_at_end(self, *, scores_wanted: bool) -> bool:
        """True if an answer with any text is to be reviewed before its end is released."""
        grown = self._watched and self.read_tokens > self._reviewed_tokens
        return bool(self.excerpt.ending) and (grown or self.in_doubt or scores_wanted)

    def request(self) -> ReviewRequest:
        """The input of the second stage."""
        return ReviewRequest(self.excerpt.ending, self._prompt_harm, self._score, self.excerpt.opening)

    def take_scores(self, scores: Scores) -> Verdict:
        """Take the scores of the second stage; the verdict on them halts the answer or lets it continue."""
        self._reviewed_tokens = self.read_tokens
        if harm(scores) >= harm(self.findings):
            self.findings = scores
        verdict = self._policy.judge_output(scores, watched=self._watched)
        if verdict.blocked:
            self.hit_at = self.hit_at or self.read_tokens
            return verdict
        self._recheck_at = max(self._review_at, _raised(self._score))
        self._hits = self.hit_at = 0
        self._set_clean(self.read_tokens)
        due_at = min(self._due_at_tokens, max(RECHECK_GROWTH * self.read_tokens, RECHECK_MIN_TOKENS))
        while due_at <= self.read_tokens:
            due_at *= RECHECK_GROWTH
        self._due_at_tokens = due_at
        return verdict

    def break_off(self, *, in_review: bool) -> None:
        """End the answer without a review: tokens that no review has read are in doubt."""
        self.in_doubt = self.in_doubt or in_review or self._watched
        if self._watched:
            self.clean_until = min(self.clean_until, self._reviewed_tokens)

    def verdict(self) -> Verdict:
        """The verdict on the highest scores of all reviews."""
        return self._policy.judge_output(self.findings, watched=self._watched)

    def recordable_findings(self) -> Scores:
        """The findings, where any policy could do something about them."""
        return self.findings if harm(self.findings) >= self._policy.answer_record_floor else {}

    def _set_clean(self, tokens: int) -> None:
        self.in_doubt, self.holdback_tokens, self.clean_until = False, self._holdback.base, tokens


def _raised(score: float) -> float:
    """The score whose logit is greater by RECHECK_LOGIT_STEP; no score is greater than 1."""
    if not 0.0 < score < 1.0:
        return math.inf if score else 0.0
    return 1.0 / (1.0 + (1.0 - score) / score * math.exp(-RECHECK_LOGIT_STEP))
