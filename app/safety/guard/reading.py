"""The turns that a guard model gets of a conversation, and the scores in its answer: pure functions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.safety.guard.templates import ANY, UNNAMED, GuardFormat, Question
from app.safety.text.turns import Message, text_of
from app.safety.verdict import Scores, highest

_OVERLAP_CHARS = 200
_MARKS = ("<|", "<start_of_", "<end_of_", "<BEGIN ", "<END ", "<bos>", "<eos>", "<think>", "</think>")

Entry = Mapping[str, Any]
"""An entry of OpenAI's `logprobs.content`."""


class Unreadable(Exception):
    """The guard's answer has no verdict."""


def turns_for(conversation: Sequence[Message], *, whole: bool) -> list[dict[str, str]]:
    """The turns a guard is shown: users' and answers in alternation, a user's first.

    Not whole, it is the last user's turn and, where it is judged, the answer to it. Only users' turns and
    answers are shown (app.safety.text.turns.conversation_of makes them of a request); turns of one role that
    follow each other are joined.
    """
    turns: list[dict[str, str]] = []
    for message in conversation:
        role, text = str(message.get("role")), defused(text_of(message.get("content")))
        if role not in ("user", "assistant") or not (turns or role == "user"):
            continue
        if turns and turns[-1]["role"] == role:
            turns[-1]["content"] += f"\n\n{text}"
        else:
            turns.append({"role": role, "content": text})
    if not turns:
        return [{"role": "user", "content": ""}]
    last = 1 if turns[-1]["role"] == "user" else 2
    return turns if whole else turns[-last:]


def fitted(turns: list[dict[str, str]], room_chars: int) -> Iterator[list[dict[str, str]]]:
    """`turns` within `room_chars`: without the oldest, and a last one that is too long in slices."""
    context, last = turns[:-1], turns[-1]
    while context and sum(len(turn["content"]) for turn in turns[-len(context) - 1 :]) > room_chars:
        context = context[2:] if len(context) > 1 else []
    if not context and last["role"] == "assistant":
        context = [{"role": "user", "content": "…"}]  # the formats have no answer without a question
    text = last["content"]
    for start in range(0, max(len(text) - _OVERLAP_CHARS, 1), room_chars - _OVERLAP_CHARS):
        yield [*context, {"role": last["role"], "content": text[start : start + room_chars]}]


def defused(text: str) -> str:
    """`text` without the marks by which the formats separate their text from the conversation."""
    for mark in _MARKS:
        text = text.replace(mark, f"< {mark[1:]}")
    return text.strip()


def settled(form: GuardFormat, text: str) -> bool:
    """True if the verdict is the harmless word, after which no label can follow."""
    harmless = next(iter(form.weights))
    answer = text.strip().casefold()
    return any(answer == f"{lead} {harmless}".strip().casefold() for lead in form.leads)


def scored(form: GuardFormat, question: Question, entries: Sequence[Entry], text: str) -> Scores:
    """The scores in one answer. Raises Unreadable."""
    p = probability(form, entries)
    if p is None:
        p = _by_word(form, text)
    if question.label is None:
        return dict.fromkeys(form.names(text) or [ANY], p)
    return {form.labels[question.label]: p}


def probability(form: GuardFormat, entries: Sequence[Entry]) -> float | None:
    """The probability of harm at the model's verdict; None without log probabilities of it.

    By the first token of each verdict, as the model cards do: the share that each has of what all
    of them have together, weighted.
    """
    preceding = ""
    for entry in entries:
        if preceding.strip() in form.leads and _word(form, entry["token"]) is not None:
            mass = _mass(form, entry)
            total = sum(mass.values())
            return sum(form.weights[word] * m for word, m in mass.items()) / total if total else None
        preceding += entry["token"]
    return None


def _mass(form: GuardFormat, entry: Entry) -> dict[str, float]:
    """The probability of each verdict's first token at this place."""
    seen = {top["token"]: top["logprob"] for top in (*entry.get("top_logprobs", ()), entry)}
    mass: dict[str, float] = {}
    for token, logprob in seen.items():
        word = _word(form, token)
        if word is not None:
            mass[word] = mass.get(word, 0.0) + math.exp(min(logprob, 0.0))
    return mass


def _word(form: GuardFormat, token: str) -> str | None:
    """The verdict that `token` begins, when it can be only one."""
    start = token.strip().casefold()
    matching = [
        word
        for word in form.weights
        if start
        and (word.startswith(start) or (start.startswith(word) and not start[len(word) :][:1].isalpha()))
    ]
    return matching[0] if len(matching) == 1 else None


def _by_word(form: GuardFormat, text: str) -> float:
    """The harm by the verdict's word alone, 0 to 1. Raises Unreadable if there is no verdict."""
    answer = text.strip()
    for lead in form.leads:
        answer = answer.removeprefix(lead).strip()
    first = answer.casefold().replace("<", " ").split()[:1]
    if not first or first[0] not in form.weights:
        raise Unreadable
    return form.weights[first[0]]


def combined(several: Sequence[Scores]) -> Scores:
    """The highest score of each category; a harm of a kind that was not said is its likeliest category's."""
    merged = dict(highest(*several))
    unsaid = merged.pop(ANY, None)
    if unsaid is not None:
        likeliest = max(merged, key=lambda category: merged[category], default=UNNAMED)
        merged[likeliest] = max(unsaid, merged.get(likeliest, 0.0))
    return merged
