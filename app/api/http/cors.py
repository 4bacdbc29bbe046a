"""CORS: the origins whose web pages may read this server's answers, by the setting `cors_origins`.

A page needs an API key like any other client: no cookie says who it is. A preflight is answered before
authentication, as browsers send no key with it. A preflight that is refused has a plain text body, which no
script can read.
"""

from __future__ import annotations

import re

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from app.settings import SettingsError

ANY = "*"
_ORIGIN = re.compile(r"https?://([a-z0-9._-]+|\[[0-9a-f:.]+\])(:[0-9]{1,5})?")
"""An origin as browsers write it in `Origin`."""
METHODS = ("GET", "HEAD", "POST", "PATCH", "DELETE")
_LIMIT_HEADERS = tuple(
    f"x-ratelimit-{what}-{unit}"
    for what in ("limit", "remaining", "reset")
    for unit in ("requests", "tokens")
)
EXPOSED = (
    "x-request-id",
    "x-conversation-id",
    "last-event-id",
    "retry-after",
    "x-should-retry",
    *_LIMIT_HEADERS,
    "x-route-reason",
    "x-served-model",
    "x-degraded",
)
"""Response headers that a page's script may read: what it needs to resume, to wait and to report."""


def with_cors(app: ASGIApp, origins: str) -> ASGIApp:
    """The application for pages of these origins; the same application where there are none.

    Raises SettingsError.
    """
    allowed = parse_origins(origins)
    if not allowed:
        return app
    return CORSMiddleware(
        app,
        allow_origins=allowed,
        allow_methods=METHODS,
        allow_headers=(ANY,),  # SDKs send headers of their own; none of them gives a right
        expose_headers=EXPOSED,
    )


def parse_origins(text: str) -> tuple[str, ...]:
    """The comma-separated origins of the setting; `*` alone means all. Raises SettingsError."""
    origins = tuple(filter(None, (origin.strip() for origin in text.split(","))))
    if origins == (ANY,):
        return origins
    for origin in origins:
        if not _ORIGIN.fullmatch(origin):
            raise SettingsError(
                "cors_origins: expected origins as https://chat.example.org or http://localhost:3000,"
                f" in lower case and without a path, or * alone, got {origin!r}"
            )
    return origins
