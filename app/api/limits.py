"""The `x-ratelimit-…` headers, on every answer to a key that has limits: streams and refusals too."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metering.limiter import Limiter
from app.store.keys import Key

LIMITED_KEY = "tokenring.limited_key"
"""Key of the scope under which the gatekeeper leaves a caller's key that has limits."""


class LimitHeaders:
    """Adds them where the response starts: as things stand once the request is admitted or refused."""

    def __init__(self, app: ASGIApp, limiter: Limiter) -> None:
        self._app = app
        self._limiter = limiter

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def send_with(message: Message) -> None:
            key: Key | None = scope.get(LIMITED_KEY)
            if key is not None and message["type"] == "http.response.start":
                headers = self._limiter.headers(key).items()
                added = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers]
                message["headers"] = [*message.get("headers", ()), *added]
            await send(message)

        await self._app(scope, receive, send_with)
