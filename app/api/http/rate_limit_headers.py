"""The `x-ratelimit-…` headers of every answer, and a delay of refusals that come in floods.

A refusal costs the event loop as much as a small answer. A caller that repeats a refused request at once
would delay everybody's tokens. A refusal that is held for a second costs only a timer, and such a caller
gets one refusal a second on each connection.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.http.sse import CONNECTION
from app.core import Key
from app.metering.limits import Limiter
from app.metering.rates import Bucket

STREAM_ID = "tokenring.stream_id"
"""Key of the scope under which a handler leaves the id of the request's generation."""
LIMITED_KEY = "tokenring.limited_key"
"""Key of the scope under which the gatekeeper leaves a caller's key that has limits."""
NAMED = "tokenring.named"
"""Key of the scope under which the gatekeeper leaves the caller's owner."""
KEY_ID = "tokenring.key_id"
"""Key of the scope under which the gatekeeper leaves the id of the caller's stored key, or None."""

REFUSALS_PER_S = 100.0
"""Refusals without delay per second, for one owner, or for all callers without a key. Refusals of a
generation are never delayed."""
HELD_S = 1.0
"""Seconds by which further refusals are delayed: less than the time-outs of clients."""


class LimitHeaders:
    """Adds the headers when the response starts, with the limits as they are then.

    Refusals that come too fast are delayed first. A refusal of a generation has a `Retry-After`, and is never
    delayed.
    """

    def __init__(self, app: ASGIApp, limiter: Limiter) -> None:
        self._app = app
        self._limiter = limiter
        self._refusals: dict[str | None, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self._is_held(scope, message["status"]):
                    if CONNECTION in scope.get("extensions", ()):
                        scope["extensions"][CONNECTION].give_way()
                    await asyncio.sleep(HELD_S)
                key: Key | None = scope.get(LIMITED_KEY)
                headers = {} if key is None else self._limiter.headers(key)
                added = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, send_with)

    def _is_held(self, scope: Scope, status: int) -> bool:
        if not 400 <= status < 500 or STREAM_ID in scope:
            return False
        owner, now_s = scope.get(NAMED), self._limiter.clock_s()
        if owner not in self._refusals:
            self._refusals[owner] = Bucket(REFUSALS_PER_S, REFUSALS_PER_S, now_s)
        return self._refusals[owner].take(now_s) > 0
