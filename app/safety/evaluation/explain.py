"""The explanation of a verdict: the deciding text, its sentences, scores, words, and each policy's action.

The screen reads several texts of a request, such as the newest message and the last turns as one text. Each
is judged alone; the strictest verdict decides.

The span that decides is the smallest run of sentences without which the verdict is milder. To look at every
run by the encoder would take minutes; so the n-grams rank the runs of a length, and the screen reads the text
without the best few. The work is bounded for any text. Keeps and logs nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from app.safety.categories import CATEGORIES, name_of
from app.safety.classifiers.bundled_models import Models
from app.safety.evaluation.traffic import policies
from app.safety.policies.allow import digest_of
from app.safety.policies.policy import Policy
from app.safety.prompt.prompt_screen import PromptScreen
from app.safety.text.hard_list import compiled
from app.safety.text.strings import message_text
from app.safety.text.turns import Message, Read, Turns, read_request, slices, text_of
from app.safety.verdict import ACTIONS, Action, Verdict, highest, stricter

MAX_CHARS = 20_000
"""Characters of a text that is explained."""
MAX_SPANS = 40
"""Sentences; where there are more, neighbours count as one."""
LEVELS = 3
"""Rounds in which the sentences of neighbours that decide are tried one by one."""
MAX_SPANS_OF_LONG = 24
"""Sentences of a text over LONG_CHARS, which the n-grams read for several milliseconds each time."""
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


class JudgedText(NamedTuple):
    """A text that the screen reads of a request, which of the messages it is, and the verdict on it alone."""

    name: str
    read: Read
    verdict: Verdict


async def explain(
    body: Mapping[str, Any], policy: Policy, screen: PromptScreen, models: Models
) -> dict[str, Any]:
    """Explain a request, of which only the messages are needed, under a policy, enforced.

    The explanation is what `tokenring safety explain --json` prints: the verdict; as `classified` the verdict
    without the policy's `allow`; all texts, what decides first; and of that text span, scores and words.
    Raises ValueError where a text of the request has over MAX_CHARS.
    """
    enforced = policy.enforced
    turns = read_request(body)
    _check_length(turns)
    judge = _Judge(enforced, screen)
    verdict = await judge(turns)
    unlifted = turns._replace(edited=lambda _edit: None)  # as the classifiers read them
    classified = verdict if verdict.lifted is None else await judge(unlifted)
    texts = await _judge_each(body, turns, classified, judge)
    _, read, alone = texts[0]
    span = None
    if alone.action is not None:
        span = await _deciding(
            read, alone, judge, lambda rest: max(models.prompts.fast(piece).harm for piece in slices(rest))
        )
    users = [text_of(message.get("content")) for message in body["messages"] if message.get("role") == "user"]
    allowed_by = sorted({number for user in users for number in policy.allow.rest(user).entries})
    hard_list = compiled(policy.hard_list)
    words = [(words, logit) for words, logit in models.evidence(read.text)[:WORDS] if logit > 0]
    return {
        "object": "safety.explanation",
        **verdict_as_json(verdict),
        "lifted": verdict.lifted,
        "classified": verdict_as_json(classified),
        "policy_hash": policy.hash,
        "texts": [_text_as_json(*each) for each in texts],
        "span": span and {"start": span.start, "end": span.end, "text": read.text[span.start : span.end]},
        "scores": _scores_as_json(alone, enforced),
        "models": {name: round(logit, 3) for name, logit in models.parts(read.text).items()},
        "words": [{"words": words, "logit": round(logit, 3)} for words, logit in words],
        "hard_list": hard_list is not None and any(hard_list.found_in(each.read.text) for each in texts),
        "allow": [{"entry": number, "reason": policy.allow.entry(number).reason} for number in allowed_by],
        "sha256": digest_of(users[-1] if users else ""),
        "policies": {name: _done(each, classified, verdict) for name, each in policies(enforced).items()},
    }


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


def verdict_as_json(verdict: Verdict) -> dict[str, Any]:
    """The part of a verdict that every command prints."""
    return {
        "action": verdict.action,
        "category": verdict.category,
        "category_name": verdict.category and name_of(verdict.category),
        "score": round(verdict.score, 4),
        "threshold": round(verdict.threshold, 4),
        "stage": verdict.stage,
    }


def _text_as_json(name: str, read: Read, alone: Verdict) -> dict[str, Any]:
    weight = round(read.weight, 4)
    return {"name": name, "weight": weight, "watch_only": read.watch, **verdict_as_json(alone)}


def _scores_as_json(verdict: Verdict, policy: Policy) -> dict[str, Any]:
    """The scores of each category by n-grams and by all classifiers, and the policy's thresholds."""
    ngrams, full = (
        highest(*(reading.scores for reading in verdict.readings if reading.stage == stage))
        for stage in ("ngrams", "encoder")
    )
    return {
        c: {
            "name": name_of(c),
            "ngrams": round(ngrams.get(c, 0.0), 4),
            "full": round(full.get(c, 0.0), 4),
            "thresholds": {action: round(at, 4) for action, at in policy.prompt_thresholds(c).items()},
        }
        for c in CATEGORIES
    }


class _Judge(NamedTuple):
    """Gives the verdict on the read texts of a request."""

    policy: Policy
    screen: PromptScreen

    async def __call__(self, turns: Turns) -> Verdict:
        first = self.screen.ngram_verdict(turns, self.policy)
        return stricter(first, await self.screen.full_verdict(turns, self.policy))


def _check_length(turns: Turns) -> None:
    longest = max((len(read.text) for read in (*turns.newest, *turns.earlier)), default=0)
    if longest > MAX_CHARS:
        raise ValueError(f"the text has {longest:,} characters, and at most {MAX_CHARS:,} are explained")


async def _judge_each(
    body: Mapping[str, Any], turns: Turns, classified: Verdict, judge: _Judge
) -> list[JudgedText]:
    """The verdict on each text that is read, the strictest first; of equals the newest."""
    reads = (*turns.newest, *turns.earlier) or (Read(""),)
    texts = [
        JudgedText(
            _name(read.text, body["messages"]),
            read,
            classified if len(reads) == 1 else await judge(_alone(read)),
        )
        for read in reads
    ]
    return sorted(texts, key=lambda each: (-_severity(each.verdict), -each.verdict.score))


def _alone(read: Read) -> Turns:
    return Turns([], [read]) if read.watch else Turns([read], [])


def _name(text: str, messages: Sequence[Message]) -> str:
    """The messages that a text is of: one, several as one text, or none, but what stands beside them."""
    numbered = list(enumerate(messages, start=1))
    for number, message in numbered:
        if text in (message_text(message), text_of(message.get("content"))):
            return f"message {number} ({message.get('role')})"
    contents = [(number, text_of(message.get("content"))) for number, message in numbered]
    inside = [str(number) for number, content in contents if content.strip() and content in text]
    return f"messages {', '.join(inside)} as one text" if inside else "what stands beside the messages"


def _done(policy: Policy, classified: Verdict, verdict: Verdict) -> Action | None:
    """The action of a policy; if `allow` lifted the refusal here, it does so there too, where it may."""
    whole = policy.judge(classified.readings)
    if verdict.lifted is None or whole.enforced != "block":
        return whole.action
    rest = [reading for reading in verdict.readings if reading.stage == "encoder"]
    return policy.lifted(whole, policy.judge(rest)).action


async def _deciding(read: Read, verdict: Verdict, judge: _Judge, harm_of: Callable[[str], float]) -> Span:
    """The smallest run of sentences without which the verdict is milder; at worst all of them.

    Where neighbours were joined, their sentences are tried in turn.
    """
    text = read.text
    within = Span(0, len(text))
    limit = MAX_SPANS if len(text) <= LONG_CHARS else MAX_SPANS_OF_LONG
    for _ in range(LEVELS):
        single = [span for span in sentences(text) if span.start >= within.start and span.end <= within.end]
        spans = joined(single, limit)
        within = await _smallest_run(read, spans, verdict, judge, harm_of)
        if len(spans) == len(single):
            break
    return within


async def _smallest_run(
    read: Read, spans: Sequence[Span], verdict: Verdict, judge: _Judge, harm_of: Callable[[str], float]
) -> Span:
    text = read.text
    for length in range(1, len(spans)):
        runs = [Span(spans[i].start, spans[i + length - 1].end) for i in range(len(spans) - length + 1)]
        ranked = sorted(runs, key=lambda run: harm_of(_without(text, run)))
        milder = []
        for run in ranked[:TRIES]:
            rest = await judge(_alone(read._replace(text=_without(text, run))))
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


def _stripped(text: str, span: Span) -> Span:
    piece = text[span.start : span.end]
    start = span.start + len(piece) - len(piece.lstrip())
    return Span(start, max(start, span.start + len(piece.rstrip())))
