"""A system prompt through its editions: what of each should be cached, what was, and where that broke.

A prompt's ids are compared with those of its edition's first request. Two prompts part at the end of the
stable part, or later if the users' words begin alike. So the earliest parting is taken as the end.
"""

from __future__ import annotations

from array import array
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, get_args

import orjson

from app.core import ChatRequest, Prompt
from app.messages import content_text, count_media
from app.prefix_report.diff import Difference, common_prefix

Cause = Literal["restarted", "salt", "system", "tools", "template", "evicted"]
Unit = Literal["character", "tool", "token"]
CAUSES: tuple[Cause, ...] = get_args(Cause)
MAX_BREAKS = 8
HEAD_TOKENS = 32_768
"""Token ids at the head of a prompt that are compared; a longer system prompt is judged by these."""
_RECENT, _USUAL = 8, 64
"""Requests that a moving average is about."""
_JUDGED_FROM = 16
_RISEN = 0.75
_SYSTEM = ("system", "developer")
_OPTIONS = ("chat_template_kwargs", "reasoning_effort", "tool_choice", "response_format", "documents")
"""Parameters, other than messages and tools, that a model's template may write into the prompt."""
_ESTIMATE_ERROR = 3
"""Times by which the estimate of a stable part's tokens may be wrong."""
_TEMPLATE_TOKENS = 64
"""Tokens of a prompt that are neither the caller's text nor tools, at most."""
_OVERHEAD_BYTES = 1024


class SeriesKey(NamedTuple):
    """The owner, key and model of a series; `key_id` is None where no stored key was used."""

    owner: str
    key_id: str | None
    model: str


class StablePart(NamedTuple):
    """The stable part of a request, which is meant to stay the same: its system text and tools."""

    text: str
    tools: bytes


def stable_of(body: Mapping[str, Any]) -> StablePart:
    """The system messages that a request begins with, and its tools as JSON.

    A text longer than any head is represented by its beginning and its hash.
    """
    texts = []
    for message in body["messages"]:
        if message["role"] not in _SYSTEM:
            break
        texts.append(content_text(message.get("content")))
    text, tools = "\n".join(texts), body.get("tools")
    if len(text) > 4 * HEAD_TOKENS:
        text = f"{text[: 4 * HEAD_TOKENS]}{hash(text)}"
    return StablePart(text, orjson.dumps(tools) if tools else b"")


@dataclass(frozen=True, slots=True)
class Break:
    """One request that found less in the cache than it should have; `at_us` is UTC."""

    cause: Cause
    unit: Unit
    what: str
    """The detail: `clock`, `id`, `text`; the tools' difference; a parameter, `policy`, `template`."""
    position: int
    length: int
    shown: str = field(repr=False)
    expected_tokens: int
    cached_tokens: int
    request_id: str
    at_us: int


@dataclass(slots=True, eq=False)
class PromptSeries:
    """A system prompt through its editions."""

    series_key: SeriesKey
    id: str
    editions: list[PromptEdition] = field(default_factory=list)
    """In the order in which they were first seen."""
    requests: int = 0
    judged: int = 0
    expected_tokens: int = 0
    cached_tokens: int = 0
    breaks: Counter[Cause] = field(default_factory=Counter)
    last: deque[Break] = field(default_factory=lambda: deque(maxlen=MAX_BREAKS))
    varies: Difference | None = None
    """The last difference between two editions' texts, with or without a break."""
    recent: float = 1.0
    usual: float = 1.0
    fallen: bool = False
    seen_us: int = 0

    def touch(self, wall_us: int) -> None:
        """Count a request, at a UTC time in microseconds."""
        self.requests += 1
        self.seen_us = wall_us

    def vary(self, difference: Difference) -> None:
        """Note how the newest edition's text differs from the one before it."""
        self.varies = difference

    @property
    def newest(self) -> PromptEdition:
        """The edition that was seen last."""
        return max(self.editions, key=lambda edition: edition.seen_s)

    def count(self, expected_tokens: int, cached_tokens: int) -> bool:
        """Add up a judged request; True where the hit rate has just fallen to half of what was usual."""
        obtained = min(cached_tokens, expected_tokens)
        self.expected_tokens += expected_tokens
        self.cached_tokens += obtained
        return self.rated(obtained / expected_tokens)

    def rated(self, rate: float) -> bool:
        """Add a request's hit rate; True where the rate has just fallen to half of what was usual."""
        self.judged += 1
        self.recent += (rate - self.recent) / min(self.judged, _RECENT)
        self.usual += (rate - self.usual) / min(self.judged, _USUAL)
        if self.fallen:
            self.fallen = self.recent < _RISEN * self.usual
            return False
        self.fallen = self.judged > _JUDGED_FROM and self.recent <= self.usual / 2
        return self.fallen


@dataclass(slots=True, eq=False)
class PromptEdition:
    """One system text with one tool list, of one key and model."""

    series: PromptSeries
    stable: StablePart
    salt: str
    epoch: int
    """The number of restarts of the engine since which the prefix is cached."""
    since_s: float
    """The time at which its prompt was in the cache; earlier requests are expected to find nothing."""
    estimate: int
    """Estimated tokens of its text and tools; 0 where there is no estimate."""
    unbilled: int = 0
    head: array[int] | None = None
    boundary: int | None = None
    """Tokens that stay the same, at most; None until there were two requests."""
    is_exact: bool = False
    """The last comparison found no earlier boundary."""
    options: Mapping[str, int] = field(default_factory=dict)
    seen_s: float = 0.0

    @property
    def head_tokens(self) -> int:
        """Token ids that are compared: those that the stable part may have, were the estimate wrong."""
        if self.estimate or not any(self.stable):
            return min(_ESTIMATE_ERROR * self.estimate + _TEMPLATE_TOKENS, HEAD_TOKENS)
        return HEAD_TOKENS

    @property
    def size_bytes(self) -> int:
        """Estimated bytes in memory, which do not change."""
        text = self.stable.text
        characters = len(text) if text.isascii() else 4 * len(text)
        return characters + len(self.stable.tools) + 8 * self.head_tokens + _OVERHEAD_BYTES

    @property
    def expected(self) -> int:
        """Tokens that a request with this text and these tools should find, the operator's included."""
        return self.estimate if self.boundary is None else self.boundary

    def touch(self, now_s: float) -> None:
        """Note the monotonic time at which a request had this edition."""
        self.seen_s = now_s

    def cached_under(self, salt: str, epoch: int) -> None:
        """Note the cache salt and the number of restarts under which the prefix is cached now."""
        self.salt, self.epoch = salt, epoch

    def set_reference(self, request: ChatRequest, prompt: Prompt, now_s: float) -> None:
        """Compare with this prompt from now on, which is in the cache."""
        self.head, self.since_s = _packed(prompt.token_ids[: self.head_tokens]), now_s
        self.boundary, self.is_exact = None, False
        self.options, self.unbilled = _options(request), prompt.unbilled_tokens

    def compare(self, request: ChatRequest, prompt: Prompt) -> int | None:
        """Learn from another prompt how far they stay the same; the token where it is *rendered* differently.

        If the rendering is the same, the result is None: the prompts part where the users' own words begin.
        """
        bound = self.head_tokens if self.boundary is None else self.boundary
        ids = _packed(prompt.token_ids[:bound])
        if self.head is None or ids is None:
            return None
        shared = common_prefix(self.head[:bound], ids)
        self.is_exact = self.boundary is not None and shared >= self.boundary
        if self.is_exact:
            return None
        # Little of the estimate stays the same: less is evidence enough where a parameter changed.
        thirds = 1 if self.changed_option(request, prompt) == "template" else 2
        if 3 * shared < thirds * self.estimate:
            return shared
        self.boundary = shared
        return None

    def changed_option(self, request: ChatRequest, prompt: Prompt) -> str:
        """The reason for another rendering: a parameter's name, `policy`, or `template`."""
        if prompt.unbilled_tokens != self.unbilled:
            return "policy"
        now = _options(request)
        return next((name for name in _OPTIONS if now.get(name) != self.options.get(name)), "template")


def estimate_of(request: ChatRequest, prompt: Prompt, stable: StablePart) -> int:
    """Estimated tokens of the stable part, by its share of the bytes; 0 with media."""
    stable_bytes, user_bytes = _num_bytes(stable.text) + len(stable.tools), 0
    messages: Sequence[Mapping[str, Any]] = request.body["messages"]
    for message in messages:
        content = message.get("content")
        if count_media(content):
            return 0
        if message["role"] not in _SYSTEM:
            user_bytes += _num_bytes(content_text(content))
    if not stable_bytes:
        return 0
    return prompt.unbilled_tokens + prompt.billed_tokens * stable_bytes // (stable_bytes + user_bytes)


def _num_bytes(text: str) -> int:
    return len(text.encode("utf-8", "surrogatepass"))


def _options(request: ChatRequest) -> Mapping[str, int]:
    body = request.body
    return {name: hash(orjson.dumps(body[name])) for name in _OPTIONS if body.get(name) is not None}


def _packed(token_ids: Sequence[int]) -> array[int] | None:
    """Ids in 8 bytes each; None with ids that are no 64-bit integers. Placeholders of images take 64."""
    try:
        return array("q", token_ids)
    except OverflowError:
        return None
