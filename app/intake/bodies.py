"""Reads the bodies of requests: how large each may be, and how much memory they take together."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.concurrency.owner_threads import LARGE_BYTES
from app.core import IdempotencyKey, ModelCard, Placement
from app.errors import BadRequest, BodyTooLarge, EngineNotReady
from app.intake.body_budget import BodyBudget, BodyLease
from app.intake.json_body import fingerprint, parse_body
from app.intake.loop_gate import LoopGate
from app.intake.scope import CONNECTION
from app.routing.backend import Backends

T = TypeVar("T")

SMALL_BODY_BYTES = 64 * 1024
"""Largest body of a route that takes names and numbers, no text to answer."""

BYTES_PER_TOKEN = 16
"""Bytes that a token of text may take: a Chinese letter in JSON's ASCII is 6 bytes and up to a token, an
emoji 12, a token of source code's indentation 16 and more, one of English prose 4."""

OVERHEAD_BYTES = 1024**2
"""Bytes for the rest of a body: tools, schemas, tool calls, and JSON's own signs."""

VISION_BYTES = 32 * 1024**2
"""The least limit where a model sees: ten photographs of 2 MB, which are a third larger in base64."""

_LEASE = "tokenring.body_lease"
_FIRST_BYTES = 64 * 1024
"""Held for a body that does not say how long it is, and doubled as it grows."""


def derived_limit_bytes(cards: list[ModelCard]) -> int:
    """The largest body that makes sense for models of these cards."""
    context_length = max((card.context_length for card in cards), default=0)
    limit_bytes = OVERHEAD_BYTES + BYTES_PER_TOKEN * context_length
    sees = any("vision" in card.capabilities for card in cards)
    return max(limit_bytes, VISION_BYTES) if sees else limit_bytes


def _check_size(size_bytes: int, limit_bytes: int) -> None:
    if size_bytes > limit_bytes:
        raise BodyTooLarge(f"The body is over {limit_bytes} bytes, the most that is read here; send less.")


class BodyReader:
    """Reads bodies within their limits."""

    def __init__(self, backends: Backends, *, max_bytes: int, timeout_s: float) -> None:
        """Take `max_bytes` at most, 0 for what the models need, each within `timeout_s`."""
        self._backends = backends
        self._max_bytes = max_bytes
        self._timeout_s = timeout_s
        self._loop_gate = LoopGate()

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

    async def read(self, request: Request, owner: str, limit_bytes: int = SMALL_BODY_BYTES) -> Body:
        """The body of a caller's request, `limit_bytes` at most, and never more than `max_body_bytes` if set.

        Its memory counts as theirs until the response begins. Where many bodies have arrived together, their
        callers alternate from here on. Raises BodyTooLarge, Unavailable, ClientDisconnect, and BadRequest
        where it arrives too slowly.
        """
        lease: BodyLease = request.scope[_LEASE]
        limit_bytes = min(limit_bytes, self._max_bytes or limit_bytes)
        declared = request.headers.get("content-length")
        if declared is not None:
            _check_size(int(declared), limit_bytes)
            await lease.grow_to(owner, int(declared))
        raw, more = bytearray(), True
        try:
            async with asyncio.timeout(self._timeout_s):
                while more:
                    message = await request.receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    raw += message.get("body", b"")
                    _check_size(len(raw), limit_bytes)
                    if declared is None:
                        size_bytes = max(_FIRST_BYTES, 1 << (len(raw) - 1).bit_length())
                        await lease.grow_to(owner, min(size_bytes, limit_bytes))
                    more = message.get("more_body", False)
        except TimeoutError:
            raise BadRequest(
                f"The body did not arrive within {self._timeout_s:g} s.", code="body_timeout"
            ) from None
        await self._loop_gate.take(owner)
        return Body(bytes(raw), request.scope)

    async def wait_for_tick(self, owner: str) -> None:
        """Wait until a request without a body may continue, as one whose body has arrived does."""
        await self._loop_gate.take(owner)


class Body:
    """A body that was read whole."""

    __slots__ = ("_scope", "raw")

    def __init__(self, raw: bytes, scope: Scope) -> None:
        self.raw = raw
        self._scope = scope

    def placement(self) -> Placement:
        """Its size, and how long it was in the socket unread."""
        unread_s = self._scope["extensions"][CONNECTION].unread_s()
        return Placement(socket_wait_s=unread_s, body_bytes=len(self.raw))

    async def idempotency(self, key: str | None) -> IdempotencyKey | None:
        """A caller's key with the fingerprint of this body."""
        return None if key is None else IdempotencyKey(key, await fingerprint(self.raw))

    async def parse(self) -> dict[str, Any]:
        """The JSON object. Raises as `parse_as`."""
        return await self.parse_as(lambda body: body)

    async def parse_as(self, make: Callable[[dict[str, Any]], T]) -> T:
        """The result of `make` for the JSON object. A large body waits for its caller's slot.

        Raises as `parse_body` and `make`, RateLimited and Overloaded.
        """
        if len(self.raw) <= LARGE_BYTES:
            return make(parse_body(self.raw))
        lease: BodyLease = self._scope[_LEASE]
        async with lease.parse_slot():
            return await asyncio.to_thread(lambda: make(parse_body(self.raw)))


class BodyMemoryLayer:
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
