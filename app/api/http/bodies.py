"""Reads the bodies of requests: how large each may be, and how much memory they take together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.http.body_budget import BodyBudget, BodyLease
from app.api.http.client import Client
from app.api.http.json_body import parse_body
from app.api.http.loop_gate import LoopGate
from app.concurrency.owner_threads import LARGE_BYTES
from app.core import ModelCard
from app.errors import EngineNotReady
from app.routing.backend import Backends

T = TypeVar("T")

SMALL_BODY_BYTES = 64 * 1024
"""Largest body of a route that takes names and numbers, no text to answer."""

BYTES_PER_TOKEN = 16
"""What a context's worth of text may take: a Chinese letter in JSON's ASCII is 6 bytes and up to a token, an
emoji 12, a token of source code's indentation 16 and more, one of English prose 4."""

ROOM_BYTES = 1024**2
"""Bytes for the rest of a body: tools, schemas, tool calls, and JSON's own signs."""

VISION_BYTES = 32 * 1024**2
"""The least limit where a model sees: ten photographs of 2 MB, which are a third larger in base64."""

_LEASE = "tokenring.body_lease"
_FIRST_BYTES = 64 * 1024
"""Held for a body that does not say how long it is, and doubled as it grows."""


def derived_limit_bytes(cards: list[ModelCard]) -> int:
    """The largest body that makes sense for models of these cards."""
    context_length = max((card.context_length for card in cards), default=0)
    limit_bytes = ROOM_BYTES + BYTES_PER_TOKEN * context_length
    sees = any("vision" in card.capabilities for card in cards)
    return max(limit_bytes, VISION_BYTES) if sees else limit_bytes


class BodyReader:
    """Reads bodies within their limits."""

    def __init__(self, backends: Backends, *, max_bytes: int, timeout_s: float) -> None:
        """Take `max_bytes` at most, 0 for what the models need, each within `timeout_s`."""
        self._backends = backends
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._turns = LoopGate()

    @property
    def limit_bytes(self) -> int:
        """The largest body of a chat request: as set, or as the models need."""
        return self._max_bytes or derived_limit_bytes(self._cards())

    def _cards(self) -> list[ModelCard]:
        cards = []
        for backend in self._backends:
            try:
                cards.append(backend.engine.model)
            except EngineNotReady:
                continue
        return cards

    async def read(
        self, request: Request, client: Client, owner: str, limit_bytes: int = SMALL_BODY_BYTES
    ) -> bytes:
        """The body of a caller's request, `limit_bytes` at most, and never more than `max_body_bytes` if set.

        Its memory counts as theirs until the response begins. Where many bodies have come together, their
        callers take turns from here on. Raises as `Client.body`, and Unavailable.
        """
        lease: BodyLease = request.scope[_LEASE]
        limit_bytes = min(limit_bytes, self._max_bytes or limit_bytes)
        declared = request.headers.get("content-length")

        async def hold(size_bytes: int) -> None:
            if declared is None:
                size_bytes = max(_FIRST_BYTES, 1 << (size_bytes - 1).bit_length())
                await lease.grow_to(owner, min(size_bytes, limit_bytes))

        if declared is not None and int(declared) <= limit_bytes:
            await lease.grow_to(owner, int(declared))
        raw = await client.body(limit_bytes, declared, self._timeout_s, hold)
        await self._turns.take(owner)
        return raw

    async def turn(self, owner: str) -> None:
        """Wait until a request without a body may go on, as one whose body has come does."""
        await self._turns.take(owner)

    async def parse(self, request: Request, raw: bytes) -> dict[str, Any]:
        """The JSON object in a body that was read. Raises as `parse_as`."""
        return await self.parse_as(request, raw, lambda body: body)

    async def parse_as(self, request: Request, raw: bytes, make: Callable[[dict[str, Any]], T]) -> T:
        """What is made of the JSON object; of a large body in a thread, when it is its caller's turn.

        Raises as `parse_body` and `make`, RateLimited and Overloaded.
        """
        if len(raw) <= LARGE_BYTES:
            return make(parse_body(raw))
        lease: BodyLease = request.scope[_LEASE]
        async with lease.turn():
            return await asyncio.to_thread(lambda: make(parse_body(raw)))


class BodyMemory:
    """The layer that lends each request memory for its body, until its response begins.

    From then on the engine has the request: what it keeps is bounded by what the engine has room for.
    """

    def __init__(self, app: ASGIApp, budget: BodyBudget) -> None:
        self._app = app
        self._budget = budget

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        lease = scope[_LEASE] = BodyLease(self._budget)

        async def send_and_release(message: Message) -> None:
            lease.release()
            await send(message)

        try:
            await self._app(scope, receive, send_and_release)
        finally:
            lease.release()
