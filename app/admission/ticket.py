"""A request in admission: what it claims, and what it is seen to use.

app.admission.admit drives it: `Admission.withdraw` refuses one that waits and whose stream is cancelled,
`_admission_of` takes one out whose task is cancelled, and `Pipeline.serve` releases one that was admitted.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Self

from app.admission.budget import KVAllocation
from app.admission.estimates import LengthEstimate
from app.admission.gap_sampler import GapSampler
from app.admission.queue import AdmissionRequest, Tenant
from app.core import ChatRequest, Delta, Prompt
from app.errors import ServingError
from app.messages import content_texts


def fingerprint_of(request: ChatRequest) -> int:
    """The hash by which a request is recognised when it is sent again: of its last message, rendered or not.

    Its answer may have been shortened by then, and its conversation not be read yet.
    """
    texts = (
        text for message in request.body["messages"][-1:] for text in content_texts(message.get("content"))
    )
    return hash((*texts, request.n))


class Ticket(AdmissionRequest):
    """A place in the queue, and then room in the engine until `release()`."""

    def __init__(
        self,
        tenant: Tenant,
        request: ChatRequest,
        prompt: Prompt,
        growth: LengthEstimate,
        now_s: float,
        *,
        step_tokens: int,
        gaps: GapSampler,
        on_progress: Callable[[Ticket, Delta], None],
        on_release: Callable[[Ticket], None],
    ) -> None:
        """`on_progress` is called at first tokens, every `step_tokens`, and at ends of choices."""
        super().__init__(tenant, 0, now_s, request.placement.socket_wait_s, fingerprint_of(request))
        self._step_tokens, self._on_progress, self._on_release = step_tokens, on_progress, on_release
        self._gaps = gaps
        self.rid = request.request_id
        self.max_tokens = prompt.max_tokens
        self.has_exact_length = bool(request.body.get("ignore_eos"))
        self.allocation = KVAllocation(prompt.token_ids, prompt.space, request.n, prompt.max_tokens, growth)
        self.charged_tokens = 0
        self.admitted_s: float | None = None
        self.queued_behind = self.started = self.reclaimed = self.is_released = False
        self.lengths = [0] * request.n
        self.new_tokens = 0
        """Tokens of a choice since `on_progress` was last called for it; 0 at its first delta."""
        self._step_ends = [1] * request.n
        self._due = [1] * request.n
        self._timed_tokens, self._timed_s = 0, 0.0
        self._future: asyncio.Future[None] | None = None

    def set_claim(self, unshared_tokens: int, capacity_tokens: int) -> None:
        """Set how much of its prompt no other request in flight has."""
        self.uncached_tokens = unshared_tokens
        self.tokens = max(min(unshared_tokens + self.allocation.mean, capacity_tokens), 1)

    def with_replica(self, prompt: Prompt) -> Prompt:
        """Its prompt with the replica that it was admitted to."""
        replica = self.allocation.replica
        return prompt if replica is None else replace(prompt, replica=replica)

    def charge(self, tokens: int) -> None:
        """Charge its key with so many tokens in place of what was charged before."""
        self.tenant.charge(tokens - self.charged_tokens)
        self.charged_tokens = tokens

    def admit(self, now_s: float, *, queued_behind: bool) -> None:
        """End its wait; `queued_behind` is whether other prompts are before it."""
        self.admitted_s, self.queued_behind = now_s, queued_behind
        self._resolve(None)

    def refuse(self, error: ServingError) -> None:
        """End the request's wait: `wait` raises `error`."""
        self._resolve(error)

    async def wait(self) -> None:
        """Wait until it is admitted. Raises what it is refused with."""
        self._future = asyncio.get_running_loop().create_future()
        await self._future

    def start(self, uncached_tokens: int) -> None:
        """Note its first token, and how much of the prompt the engine computed."""
        self.started, self.uncached_tokens = True, uncached_tokens

    def reclaim(self) -> None:
        """Note that it was aborted so that others have room."""
        self.reclaimed = True

    def since_last(self, tokens: int, now_s: float) -> tuple[int, float]:
        """Tokens of the first choice since the last call, and their seconds; no tokens at the first."""
        new_tokens = tokens - self._timed_tokens if self._timed_tokens else 0
        took_s, self._timed_tokens, self._timed_s = now_s - self._timed_s, tokens, now_s
        return new_tokens, took_s

    def on_delta(self, delta: Delta) -> None:
        """Take note of a delta, with the engine's own counts. Costs next to nothing between steps."""
        tokens = delta.counts.completion_tokens
        if tokens >= self._due[delta.choice] or delta.finish_reason is not None:
            self._look(delta, tokens)

    def _look(self, delta: Delta, tokens: int) -> None:
        choice, is_first = delta.choice, delta.choice == 0
        if is_first:
            self._due[0] = self._gaps.look(tokens)
        if tokens < self._step_ends[choice] and delta.finish_reason is None:
            return
        earlier_tokens, self.lengths[choice] = self.lengths[choice], tokens
        self.new_tokens = tokens - earlier_tokens if earlier_tokens else 0
        step_tokens = max(self._step_tokens, tokens >> 3)
        self._step_ends[choice] = tokens + step_tokens
        self._due[choice] = self._gaps.begin(tokens, step_tokens) if is_first else tokens + step_tokens
        self._on_progress(self, delta)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()

    def release(self) -> None:
        """Give back the room; a second call does nothing."""
        if not self.is_released:
            self.is_released = True
            self._on_release(self)

    def _resolve(self, error: ServingError | None) -> None:
        if self._future is not None and not self._future.done():
            self._future.set_result(None) if error is None else self._future.set_exception(error)
