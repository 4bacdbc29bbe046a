"""Access to handlers: who may call one, and how often. The caller is named once, in front of it.

The bounds are for requests that no limit of a key counts: their rate, and how many read the store at once.
"""

from __future__ import annotations

import contextlib
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.types import ASGIApp

from app.api.http.auth import Gatekeeper
from app.intake.caller import Caller
from app.metering.reads import Reads

Endpoint = Callable[[Request], Awaitable[ASGIApp]]
Handler = Callable[[Request, Caller], Awaitable[ASGIApp]]


class Access:
    """Puts handlers behind the gatekeeper."""

    def __init__(self, gatekeeper: Gatekeeper, reads: Reads) -> None:
        self._gatekeeper = gatekeeper
        self._reads = reads

    def __call__(
        self, handler: Handler, *, admin: bool = False, paced: bool = False, alone: bool = False
    ) -> Endpoint:
        """The handler for every caller that has a key, or needs none; with `admin` for admin keys.

        `paced` bounds it to `max_reads_per_s`. `alone` does too, and takes one request of an owner at a
        time: for routes that read the store and no body.
        """

        async def handle(request: Request) -> ASGIApp:
            caller = self._gatekeeper.admin(request) if admin else self._gatekeeper.caller(request)
            if paced or alone:
                self._reads.charge(caller.owner, caller.key)
            async with self._reads.slot(caller.owner) if alone else contextlib.nullcontext():
                return await handler(request, caller)

        return handle
