"""The layer that counts responses when they start; see app.metering.traffic."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.metering.traffic import NO_ROUTE, ResponseCounts


class CountedResponses:
    """The outermost layer: counts each response when it starts."""

    def __init__(self, app: ASGIApp, counts: ResponseCounts) -> None:
        self._app = app
        self._counts = counts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""

        async def counted(message: Message) -> None:
            if message["type"] == "http.response.start":
                self._counts.add(message["status"], getattr(scope.get("route"), "path", NO_ROUTE))
            await send(message)

        await self._app(scope, receive, counted)
