"""One request's way through admission: what it claims, and what it is seen to use."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol, Self

from app.admission.fair_queue import Lane, Queued
from app.admission.kv_budget import Claim
from app.admission.output_length import Growth
from app.core import ChatRequest, Delta, Prompt

_LETTERS = 4
"""Of a token, about."""
STEP_TOKENS = 32
"""After how many tokens of a choice a reservation is looked at again; later at an eighth of its length."""


def fingerprint_of(request: ChatRequest) -> int:
    """What a key's request is known by when it comes again: its last message, before it is rendered too.

    Its answer may have been shortened by then, and its conversation not be read yet.
    """
    return hash((*_texts(request.body["messages"][-1:]), request.n))


def prompt_guess(request: ChatRequest) -> int:
    """About how many tokens a prompt has, by its letters; its history is not read yet."""
    return sum(map(len, _texts(request.body["messages"]))) // _LETTERS


def _texts(messages: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What checked messages say, as the caller sent them."""
    for message in messages:
        content = message.get("content")
        if isinstance(content, str):
            yield content
        else:
            yield from (part["text"] for part in content or () if part["type"] == "text")


class Knock(Queued):
    """A request that has not been rendered: all the door needs to know of it."""

    __slots__ = ("fingerprint",)

    def __init__(self, lane: Lane, request: ChatRequest, tokens: int, now_s: float) -> None:
        super().__init__(lane, tokens, now_s, request.placement.socket_wait_s)
        self.fingerprint = fingerprint_of(request)


class Desk(Protocol):
    """Who hands out tickets (app.admission.controller)."""

    def progressed(self, ticket: Ticket, delta: Delta) -> None:
        """A request has its first token, some more, or a choice has ended."""
        ...

    def released(self, ticket: Ticket) -> None:
        """A request has ended."""
        ...


class Ticket(Queued):
    """A place in the queue, and then room in the pool until `release()`."""

    __slots__ = (
        "_desk",
        "_due",
        "behind",
        "charged_tokens",
        "claim",
        "exact",
        "fingerprint",
        "future",
        "lengths",
        "let_in_s",
        "max_tokens",
        "over",
        "own_tokens",
        "paced_s",
        "paced_tokens",
        "reclaimed",
        "rid",
        "started",
        "uncached_tokens",
    )

    def __init__(
        self, desk: Desk, lane: Lane, request: ChatRequest, prompt: Prompt, growth: Growth, now_s: float
    ) -> None:
        super().__init__(lane, 0, now_s, request.placement.socket_wait_s)
        self._desk = desk
        self.rid = request.request_id
        self.fingerprint = fingerprint_of(request)
        self.max_tokens = prompt.max_tokens
        self.exact = bool(request.body.get("ignore_eos"))
        self.claim = Claim(prompt.token_ids, prompt.space, request.n, prompt.max_tokens, growth)
        self.own_tokens = 0
        """Of its prompt, those that no other in flight had when it was let in."""
        self.uncached_tokens = 0
        """Of its prompt, as far as that can be told before the first token."""
        self.charged_tokens = 0
        self.let_in_s: float | None = None
        self.behind = False
        self.started = False
        self.reclaimed = False
        self.over = False
        self.lengths = [0] * request.n
        self._due = [1] * request.n
        self.paced_tokens, self.paced_s = 0, 0.0
        """Of the first choice: how many tokens it had when they were looked at last, and when that was."""
        self.future: asyncio.Future[None] | None = None

    def saw(self, delta: Delta) -> None:
        """Take note of a delta, with the engine's own counts. Costs nothing for most of them."""
        tokens = delta.counts.completion_tokens
        if tokens >= self._due[delta.choice] or delta.finish_reason is not None:
            self.lengths[delta.choice] = tokens
            self._due[delta.choice] = tokens + max(STEP_TOKENS, tokens >> 3)
            self._desk.progressed(self, delta)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Give back the room, whatever has happened."""
        self.release()

    def release(self) -> None:
        """Give back the room; a second call does nothing."""
        if not self.over:
            self.over = True
            self._desk.released(self)
