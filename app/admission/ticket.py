"""One request's way through admission: what it claims, and what it is seen to use."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Self

from app.admission.capacity import KVReservation
from app.admission.estimates import LengthEstimate
from app.admission.fair_queue import Queued, Tenant
from app.core import ChatRequest, Delta, Prompt
from app.messages import content_texts

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
        yield from content_texts(message.get("content"))


class PreAdmission(Queued):
    """A request that has not been rendered: all that the load shedder needs to know of it."""

    __slots__ = ("fingerprint",)

    def __init__(self, tenant: Tenant, request: ChatRequest, tokens: int, now_s: float) -> None:
        super().__init__(tenant, tokens, now_s, request.placement.socket_wait_s)
        self.fingerprint = fingerprint_of(request)


class Ticket(Queued):
    """A place in the queue, and then room in the pool until `release()`."""

    __slots__ = (
        "_due",
        "_on_progress",
        "_on_release",
        "admitted_s",
        "charged_tokens",
        "exact",
        "fingerprint",
        "future",
        "lengths",
        "max_tokens",
        "over",
        "queued_behind",
        "reclaimed",
        "reservation",
        "rid",
        "started",
        "timed_s",
        "timed_tokens",
        "uncached_tokens",
        "unshared_tokens",
    )

    def __init__(
        self,
        tenant: Tenant,
        request: ChatRequest,
        prompt: Prompt,
        growth: LengthEstimate,
        now_s: float,
        *,
        on_progress: Callable[[Ticket, Delta], None],
        on_release: Callable[[Ticket], None],
    ) -> None:
        """`on_progress` hears of first tokens, of more, and of ends of choices; `on_release` of the end."""
        super().__init__(tenant, 0, now_s, request.placement.socket_wait_s)
        self._on_progress, self._on_release = on_progress, on_release
        self.rid = request.request_id
        self.fingerprint = fingerprint_of(request)
        self.max_tokens = prompt.max_tokens
        self.exact = bool(request.body.get("ignore_eos"))
        self.reservation = KVReservation(prompt.token_ids, prompt.space, request.n, prompt.max_tokens, growth)
        self.unshared_tokens = 0
        """Of its prompt, those that no other in flight had when it was let in."""
        self.uncached_tokens = 0
        """Of its prompt, as far as that can be told before the first token."""
        self.charged_tokens = 0
        self.admitted_s: float | None = None
        self.queued_behind = False
        self.started = False
        self.reclaimed = False
        self.over = False
        self.lengths = [0] * request.n
        self._due = [1] * request.n
        self.timed_tokens, self.timed_s = 0, 0.0
        """Of the first choice: how many tokens it had when they were looked at last, and when that was."""
        self.future: asyncio.Future[None] | None = None

    def on_delta(self, delta: Delta) -> None:
        """Take note of a delta, with the engine's own counts. Costs nothing for most of them."""
        tokens = delta.counts.completion_tokens
        if tokens >= self._due[delta.choice] or delta.finish_reason is not None:
            self.lengths[delta.choice] = tokens
            self._due[delta.choice] = tokens + max(STEP_TOKENS, tokens >> 3)
            self._on_progress(self, delta)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        """Give back the room, whatever has happened."""
        self.release()

    def release(self) -> None:
        """Give back the room; a second call does nothing."""
        if not self.over:
            self.over = True
            self._on_release(self)
