"""The `x-ratelimit-…` headers of every answer, and a pause where refusals come in floods.

A refusal costs the loop what a small answer does. A caller who sends the next request as soon as the last one
is refused would keep the loop from everybody's tokens. A refusal that is held for a second costs a timer, and
such a caller gets one a second on each connection.
"""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.api.http.sse import CONNECTION
from app.core import Key
from app.metering.bucket import Bucket
from app.metering.limiter import Limiter

STREAM_ID = "tokenring.stream_id"
"""Key of the scope under which a handler leaves the id of the request's generation."""
LIMITED_KEY = "tokenring.limited_key"
"""Key of the scope under which the gatekeeper leaves a caller's key that has limits."""
NAMED = "tokenring.named"
"""Key of the scope under which the gatekeeper leaves the caller's owner."""

REFUSALS_PER_S = 100.0
"""Refusals that one owner, or all who have no key, are answered at once, in a second, before there is a
generation."""
HELD_S = 1.0
"""Seconds that refusals beyond are held: less than clients wait for an answer, and before they try again."""


class LimitHeaders:
    """Adds them where the response starts: as things stand once the request is admitted or refused.

    Refusals that come too fast are held first; those of a generation, which are appointments, never.
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
