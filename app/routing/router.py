"""`model: "auto"`: which of two models answers, by rules that docs/routing.md lists with their points.

The decision reads the request alone, bounded, asks no model, and tells its reason. It is in this order:
what the caller asks for, what the key may use, which model is there, what a model can serve at all, which
one has answered the conversation so far, and then points: from `LARGE_FROM` on the large model, below it
the small one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from app.core import ChatRequest, ModelCard
from app.messages import content_text, count_media
from app.routing.backend import Backend
from app.routing.keywords import (
    CODE_SIGNS,
    CODE_WORDS,
    EASY_WORDS,
    HARD_WORDS,
    MATH_SIGNS,
    MATH_WORDS,
    TASK_WORDS,
)
from app.store.conversations import BranchSummary

Size = Literal["small", "large"]
AUTO = "auto"
"""The model's name in a request that leaves the choice to the server."""
LARGE_FROM = 2
READ_CHARACTERS = 8192
"""Characters of the last user turns that are read: half at the beginning, half at the end."""
_TURNS_READ = 3
_WORD_CHARACTERS = 2048

LENGTHS = ((1500, 3), (500, 1))
"""(prompt tokens, points)"""
DEPTHS = ((8, 3), (5, 2), (3, 1))
"""(turns of the user, points)"""
DETAILS = ((40, 2), (12, 1))
"""(words of the last turn, points); two numbers in it are one more"""
ANSWERS = ((2048, 2), (1024, 1))
"""(max_tokens, points)"""
MARKS = 3
TOOLS = 4
IMAGES = 2
SCHEMA = 1
_FORMULA_POINTS = 1

_MAX_WORD_POINTS = 4
_MAX_EASY_POINTS = 2
_MAX_TASK_POINTS = 2
_NUMBERS = 2
_NUMBER = re.compile(r"\d[\d.,]*")
_EASY_BELOW = 200
"""Prompt tokens; in a longer prompt an easy word is no sign."""
_FORMULA = re.compile(r"[0-9a-z)] ?[*^=] ?-?[0-9a-z(]")
_WORD = re.compile(r"[a-z][a-z+'-]*")
_SIGNS = 2
_OTHERS: Sequence[tuple[Size, Size]] = (("small", "large"), ("large", "small"))


EMPTY_BRANCH = BranchSummary()


@dataclass(frozen=True, slots=True)
class Route:
    """The model that answers, and the reason; `reason` is one word, for the metric."""

    model: str
    size: Size
    reason: str
    points: Mapping[str, int]

    @property
    def header(self) -> str:
        """The value of `x-route-reason`."""
        named_points = [f"{name}={points:+d}" for name, points in self.points.items() if points]
        return "; ".join([self.size, self.reason, *([", ".join(named_points)] if named_points else [])])


class Router:
    """Chooses between a small model and a large one, and counts what it chose."""

    def __init__(self, small: Backend, large: Backend) -> None:
        self._backends: Mapping[Size, Backend] = {"small": small, "large": large}
        self.routed: dict[str, Counter[str]] = defaultdict(Counter)
        """Requests by model and reason."""

    def route(
        self,
        request: ChatRequest,
        prompt_tokens: int,
        *,
        requested: Size | None = None,
        allowed: Collection[str] | None = None,
        branch: BranchSummary = EMPTY_BRANCH,
    ) -> Route:
        """The model for a request whose own messages have about so many tokens.

        `requested` is the caller's choice (`x-route`), `allowed` the models of the key. If neither model
        can serve the request, the large one refuses it.
        """
        route = self._decide(request, prompt_tokens + branch.tokens, requested, allowed, branch=branch)
        self.routed[route.model][route.reason] += 1
        return route

    def _decide(
        self,
        request: ChatRequest,
        prompt_tokens: int,
        requested: Size | None,
        allowed: Collection[str] | None,
        *,
        branch: BranchSummary,
    ) -> Route:
        usable = [s for s, backend in self._backends.items() if allowed is None or backend.id in allowed]
        there = [size for size in usable if self._backends[size].ready]
        if requested is not None and requested in there:
            return self._to(requested, "asked")
        if len(usable) == 1:
            return self._to(usable[0], "key")
        if len(there) < len(usable):
            return self._to(there[0] if there else "large", "alone")
        for size, other in _OTHERS:
            lacking = unserved(self._backends[size].engine.model, request, prompt_tokens, branch)
            if lacking is not None:
                return self._to(other, lacking)
        if branch.model == self._backends["large"].id:
            return self._to("large", "conversation")
        return self._by_points(points_of(request, prompt_tokens, branch.turns))

    def _by_points(self, points: Mapping[str, int]) -> Route:
        if sum(points.values()) >= LARGE_FROM:
            return self._to("large", max(points, key=lambda name: points[name]), points)
        return self._to("small", "simple", points)

    def _to(self, size: Size, reason: str, points: Mapping[str, int] | None = None) -> Route:
        return Route(self._backends[size].id, size, reason, points or {})


def unserved(
    card: ModelCard, request: ChatRequest, prompt_tokens: int, branch: BranchSummary = EMPTY_BRANCH
) -> str | None:
    """A need of a request, or of its conversation, that a model does not meet; None if it meets all."""
    body = request.body
    needs = {
        "vision": branch.images or _has_images(body["messages"]),
        "tools": _has_tools(body),
        "json_schema": _kind_of_format(body) == "json_schema",
        "reasoning": body.get("reasoning_effort") not in (None, "none"),
        "logprobs": request.logprobs,
    }
    for name, needed in needs.items():
        if needed and name not in card.capabilities:
            return name
    room = min(card.context_length - (request.max_tokens or 1), card.max_prompt_tokens)
    return "context" if prompt_tokens > room else None


def points_of(request: ChatRequest, prompt_tokens: int, turns_before: int = 0) -> dict[str, int]:
    """The points for the large model, by what they are for; easy words are below zero."""
    body = request.body
    messages: Sequence[Mapping[str, Any]] = body["messages"]
    user_messages = [message for message in messages if message["role"] == "user"]
    recent = _read(user_messages[-_TURNS_READ:])
    last = _read(user_messages[-1:])[:_WORD_CHARACTERS].lower()
    listed = _WORD.findall(last)
    words = set(listed)
    code = MARKS if _is_code(recent) else _of(CODE_WORDS, words)
    math = MARKS if any(sign in recent for sign in MATH_SIGNS) else _of(MATH_WORDS, words)
    return {
        "code": code,
        "math": math + _FORMULA_POINTS * (_FORMULA.search(last) is not None),
        "tools": TOOLS if _has_tools(body) else 0,
        "images": IMAGES if _has_images(messages) else 0,
        "length": _step(LENGTHS, prompt_tokens),
        "depth": _step(DEPTHS, len(user_messages) + turns_before),
        "words": _of(HARD_WORDS, words),
        "task": min(_of(TASK_WORDS, words), _MAX_TASK_POINTS),
        "detail": _step(DETAILS, len(listed)) + (len(_NUMBER.findall(last)) >= _NUMBERS),
        "answer": _step(ANSWERS, request.max_tokens or 0),
        "format": SCHEMA if _kind_of_format(body) == "json_schema" else 0,
        "easy": -min(len(words & EASY_WORDS), _MAX_EASY_POINTS) if prompt_tokens < _EASY_BELOW else 0,
    }


def _of(table: Mapping[str, int], words: Collection[str]) -> int:
    return min(sum(points for word, points in table.items() if word in words), _MAX_WORD_POINTS)


def _step(steps: Sequence[tuple[int, int]], value: int) -> int:
    return next((points for least, points in steps if value >= least), 0)


def _is_code(text: str) -> bool:
    return "```" in text or sum(sign in text for sign in CODE_SIGNS) >= _SIGNS


def _read(messages: Sequence[Mapping[str, Any]]) -> str:
    """The text of messages, the middle of a long one left out."""
    text = "\n".join(content_text(message.get("content")) for message in messages)
    if len(text) <= READ_CHARACTERS:
        return text
    return f"{text[: READ_CHARACTERS // 2]}\n{text[-READ_CHARACTERS // 2 :]}"


def _has_images(messages: Sequence[Mapping[str, Any]]) -> bool:
    return any(count_media(message.get("content")) for message in messages)


def _has_tools(body: Mapping[str, Any]) -> bool:
    return bool(body.get("tools")) and body.get("tool_choice") != "none"


def _kind_of_format(body: Mapping[str, Any]) -> str | None:
    wanted = body.get("response_format")
    kind = wanted.get("type") if isinstance(wanted, dict) else None
    return kind if isinstance(kind, str) else None
