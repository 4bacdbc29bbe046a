"""The layers around the routes: counts of responses, paths with a slash at their end, limits in headers."""

from __future__ import annotations

import asyncio

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.core import Key
from app.intake.scope import CONNECTION, LIMITED_KEY, OWNER, STREAM_ID
from app.metering.limits import Limiter
from app.metering.rates import Bucket
from app.metering.traffic import NO_ROUTE, ResponseCounts

REFUSALS_PER_S = 100.0
"""Refusals without delay per second, for one owner, or for all callers without a key. Refusals of a
generation are never delayed."""
REFUSAL_DELAY_S = 1.0
"""Seconds by which further refusals are delayed: less than the time-outs of clients."""


class LimitHeaders:
    """Adds `x-ratelimit-…` headers when a response starts, with the limits as they are then.

    Refusals that arrive in floods are delayed first: a refusal costs the event loop as much as a small
    answer, and a caller that repeats a refused request at once would delay everybody's tokens. A delayed one
    costs only a timer, and such a caller gets one a second on each connection. A refusal of a generation has
    a `Retry-After`, and is never delayed.
    """

    def __init__(self, app: ASGIApp, limiter: Limiter) -> None:
        self._app = app
        self._limiter = limiter
        self._refusals: dict[str | None, Bucket] = {}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with(message: Message) -> None:
            if message["type"] == "http.response.start":
                if self._is_delayed(scope, message["status"]):
                    if CONNECTION in scope.get("extensions", ()):
                        scope["extensions"][CONNECTION].allow_closing()
                    await asyncio.sleep(REFUSAL_DELAY_S)
                key: Key | None = scope.get(LIMITED_KEY)
                headers = {} if key is None else self._limiter.headers(key)
                added = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, send_with)

    def _is_delayed(self, scope: Scope, status: int) -> bool:
        if not 400 <= status < 500 or STREAM_ID in scope:
            return False
        owner, now_s = scope.get(OWNER), self._limiter.clock_s()
        if owner not in self._refusals:
            self._refusals[owner] = Bucket(REFUSALS_PER_S, REFUSALS_PER_S, now_s)
        return self._refusals[owner].take(now_s) > 0


class CountedResponses:
    """The outermost layer: counts each response when it starts, and serves `/v1/models/` as `/v1/models`.

    A redirect to the path without the slash would be built from the Host header, and clients drop their
    body and their key on it.
    """

    def __init__(self, app: ASGIApp, counts: ResponseCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope["path"]
        if path.endswith("/") and path != "/":
            scope["path"] = path[:-1]

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.add(message["status"], getattr(scope.get("route"), "path", NO_ROUTE))
            await send(message)

        await self._app(scope, receive, counted)
