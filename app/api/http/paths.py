"""Paths as clients write them: with a slash at their end, they name the same routes."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class TrailingSlash:
    """The layer that serves `/v1/models/` as `/v1/models`, without a redirect.

    A redirect would be built from the Host header, and clients drop their body and their key on it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        path = scope["path"]
        if path.endswith("/") and path != "/":
            scope["path"] = path[:-1]
        await self._app(scope, receive, send)
