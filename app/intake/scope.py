"""Keys of a request's ASGI scope, under which a handler and the layers around it tell each other facts."""

from __future__ import annotations

CONNECTION = "tokenring.connection"
"""Key of the ASGI extension: the request's connection, a `FrameSink` (app.api.http.protocol.Connection)."""
OWNER = "tokenring.owner"
"""The caller's owner. Without it the caller is unknown."""
KEY_ID = "tokenring.key_id"
"""The id of the caller's stored key, or None."""
LIMITED_KEY = "tokenring.limited_key"
"""The caller's key, if it has limits."""
STREAM_ID = "tokenring.stream_id"
"""The id of the request's generation."""
RESPONSE_HEADERS = "tokenring.response_headers"
"""Routing headers of the answer, or of the refusal."""
PROXY_USER = "tokenring.proxy_user"
"""The values, as bytes, of the header in which a trusted proxy names the signed-in person."""
