"""Bounds on requests that no limit of a key counts: their rate, and how many read the store at once."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import ASGIApp

from app.api.http.auth import Gatekeeper
from app.metering.reads import Reads

Handler = Callable[[Request], Awaitable[ASGIApp]]


class ReadBounds:
    """Puts handlers behind the bounds, by the caller's owner."""

    def __init__(self, reads: Reads, gatekeeper: Gatekeeper) -> None:
        self._reads = reads
        self._gatekeeper = gatekeeper

    def paced(self, handler: Handler) -> Handler:
        """The handler, bounded to `max_reads_per_s`."""

        async def handle(request: Request) -> ASGIApp:
            caller = self._gatekeeper.caller(request)
            self._reads.charge(caller.owner, caller.key)
            return await handler(request)

        return handle

    def in_turn(self, handler: Handler) -> Handler:
        """The same, and one request of an owner at a time: for routes that read the store and no body."""

        async def handle(request: Request) -> ASGIApp:
            caller = self._gatekeeper.caller(request)
            self._reads.charge(caller.owner, caller.key)
            async with self._reads.turn(caller.owner):
                return await handler(request)

        return handle
