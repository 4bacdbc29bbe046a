"""An edition of a prompt: one system prompt with one tool list, and the prefix that should be cached.

A prompt's ids are compared with those of the line's first request. Where they part is where the part
that stays ends, or later, by what the two users' words have in common: `slack` bounds by how much.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import orjson

from app.core import ChatRequest, Prompt
from app.messages import content_text, count_media
from app.prefix_report.diff import common_prefix

HEAD_TOKENS = 32_768
"""Token ids at the head of a prompt that are compared; a longer system prompt is judged by these."""
OPENING_CHARACTERS = 256
UNKNOWN = 1 << 40
_SYSTEM = ("system", "developer")
_OPTIONS = ("chat_template_kwargs", "reasoning_effort", "tool_choice", "response_format", "documents")
"""Parameters, other than messages and tools, that a model's template may write into the prompt."""
_FEWEST_OF_ESTIMATE = 3
_OVERHEAD_BYTES = 1024


class Stable(NamedTuple):
    """The stable part of a request, which is meant to stay the same: its system text and tools."""

    text: str
    tools: bytes


def stable_of(body: Mapping[str, Any]) -> Stable:
    """The system messages that a request begins with, and its tools as JSON."""
    messages, tools = body["messages"], body.get("tools")
    packed = orjson.dumps(tools) if tools else b""
    if not messages or messages[0]["role"] not in _SYSTEM:
        return Stable("", packed)
    if len(messages) == 1 or messages[1]["role"] not in _SYSTEM:
        return Stable(content_text(messages[0].get("content")), packed)
    end = next((i for i, m in enumerate(messages) if m["role"] not in _SYSTEM), len(messages))
    return Stable("\n".join(content_text(m.get("content")) for m in messages[:end]), packed)


@dataclass(slots=True, eq=False)
class PromptEdition:
    """One system text with one tool list, of one key and model."""

    stable: Stable
    salt: str
    epoch: int
    since_s: float
    """The time at which its prompt was in the cache; earlier requests are expected to find nothing."""
    estimate: int
    """Estimated tokens of its text and tools; 0 where there is no estimate."""
    unbilled: int
    head: array[int] | None = None
    boundary: int | None = None
    """Tokens that stay the same, at most; None until there were two requests."""
    slack: int = UNKNOWN
    opening: str = ""
    options: dict[str, int] = field(default_factory=dict)
    seen_s: float = 0.0
    counted_bytes: int = 0

    @property
    def size_bytes(self) -> int:
        """Estimated bytes in memory."""
        head = 0 if self.head is None else len(self.head) * self.head.itemsize
        text = self.stable.text
        characters = len(text) if text.isascii() else 4 * len(text)
        return characters + len(self.stable.tools) + head + _OVERHEAD_BYTES

    @property
    def expected(self) -> int:
        """Tokens that a request with this text and these tools should find, the operator's included."""
        return self.estimate if self.boundary is None else self.boundary

    def saw(self, now_s: float) -> None:
        """Note the monotonic time at which a request had this edition."""
        self.seen_s = now_s

    def cached_under(self, salt: str, epoch: int) -> None:
        """Note the cache salt and the engine's restart count under which the prefix is cached now."""
        self.salt, self.epoch = salt, epoch

    def recount(self) -> int:
        """Count the bytes in memory anew; returns by how many they have grown since the last count."""
        growth = self.size_bytes - self.counted_bytes
        self.counted_bytes += growth
        return growth

    def render_anew(self, request: ChatRequest, prompt: Prompt, now_s: float) -> None:
        """Take a prompt that is rendered differently as what is in the cache from now on."""
        self.render(request, prompt)
        self.since_s = now_s

    def render(self, request: ChatRequest, prompt: Prompt) -> None:
        """Take a prompt as what the line's prompts begin like."""
        self.head = _packed(prompt.token_ids)
        self.boundary, self.slack = None, UNKNOWN
        self.opening, self.options = _opening(request), _options(request)
        self.unbilled = prompt.unbilled_tokens

    def compare(self, request: ChatRequest, prompt: Prompt) -> int | None:
        """Learn from another prompt how far they stay the same; the token where it is *rendered* differently.

        None where it is not: where they part is then where the users' own words begin.
        """
        if self.head is None:
            return None
        ids = _packed(prompt.token_ids[: len(self.head)])
        if ids is None:
            return None
        if ids.typecode != self.head.typecode:
            ids, self.head = array("q", ids), array("q", self.head)
        shared = common_prefix(self.head, ids)
        bound = UNKNOWN if self.boundary is None else self.boundary
        if shared >= bound:
            return None
        beyond_slack = self.slack < UNKNOWN and shared < bound - self.slack - 1
        if beyond_slack or shared * _FEWEST_OF_ESTIMATE < self.estimate:
            return shared
        self.boundary, self.slack = shared, _slack(self.opening, _opening(request))
        self.head = self.head[:shared]
        return None

    def changed_option(self, request: ChatRequest, prompt: Prompt) -> str:
        """Why a prompt is rendered differently: a parameter's name, `policy`, or `template`."""
        if prompt.unbilled_tokens != self.unbilled:
            return "policy"
        now = _options(request)
        return next((name for name in _OPTIONS if now.get(name) != self.options.get(name)), "template")


def estimate_of(request: ChatRequest, prompt: Prompt, stable: Stable) -> int:
    """Estimated tokens of the stable part, by its share of the bytes; 0 with media."""
    stable_bytes = len(stable.text.encode("utf-8", "surrogatepass")) + len(stable.tools)
    others = 0
    messages: Sequence[Mapping[str, Any]] = request.body["messages"]
    for message in messages:
        content = message.get("content")
        if count_media(content):
            return 0
        if message["role"] not in _SYSTEM:
            others += len(content_text(content).encode("utf-8", "surrogatepass"))
    if not stable_bytes:
        return 0
    return prompt.unbilled_tokens + prompt.billed_tokens * stable_bytes // (stable_bytes + others)


def _opening(request: ChatRequest) -> str:
    """The beginning of what follows the system prompt, without the white space that templates trim."""
    messages: Sequence[Mapping[str, Any]] = request.body["messages"]
    first = next((m for m in messages if m["role"] not in _SYSTEM), None)
    return (
        ""
        if first is None
        else content_text(first.get("content"))[: 4 * OPENING_CHARACTERS].strip()[:OPENING_CHARACTERS]
    )


def _slack(opening: str, other: str) -> int:
    """An upper bound of the tokens that two users' texts begin with in common: a token has a byte."""
    shared = common_prefix(opening, other)
    if shared == min(len(opening), len(other)) and (shared == OPENING_CHARACTERS or opening == other):
        return UNKNOWN  # they may go on alike
    return len(opening[:shared].encode("utf-8", "surrogatepass"))


def _options(request: ChatRequest) -> dict[str, int]:
    body = request.body
    return {name: hash(orjson.dumps(body[name])) for name in _OPTIONS if body.get(name) is not None}


def _packed(token_ids: Sequence[int]) -> array[int] | None:
    for typecode in ("I", "q"):
        try:
            return array(typecode, token_ids[:HEAD_TOKENS])
        except OverflowError:  # placeholders of images
            continue
    return None
