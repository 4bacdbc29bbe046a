"""The headers by which a client finds its stream again, and those that tell it of a stream."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from app.api.http.json_body import fingerprint
from app.core import IdempotencyKey
from app.errors import BadRequest, ReplayPositionUnknown
from app.stream.token_stream import TokenStream


def stream_headers(stream: TokenStream) -> dict[str, str]:
    """The headers of an answer: its id, its conversation, how it was served."""
    headers = {"x-request-id": stream.request_id, **stream.request.placement.response_headers}
    if stream.request.conversation_id is not None:
        headers["x-conversation-id"] = stream.request.conversation_id
    return headers


async def idempotency_key(request: Request, raw: bytes) -> IdempotencyKey | None:
    """The key of a request with this body; None without one. Raises BadRequest."""
    key = request.headers.get("idempotency-key")
    if key is None:
        return None
    if not 0 < len(key) <= 255:
        raise BadRequest("Idempotency-Key must have 1 to 255 characters.", param="Idempotency-Key")
    return IdempotencyKey(key, await fingerprint(raw))


def check_fresh(after: int) -> None:
    """Refuse to start a generation for a client that believes it has seen a part of it."""
    if after:
        raise ReplayPositionUnknown(
            f"Last-Event-ID {after} was never sent: there is no generation under this request's"
            " Idempotency-Key. Attach with GET and the id of the answer, or send no Last-Event-ID.",
            param="Last-Event-ID",
        )


def last_event_id(request: Request) -> int:
    """The last event that the client has; 0 without any. Raises ReplayPositionUnknown."""
    raw: Any = request.headers.get("last-event-id", request.query_params.get("last_event_id"))
    if raw is None or raw == "":
        return 0
    if not (raw.isascii() and raw.isdigit() and len(raw) < 16):
        raise ReplayPositionUnknown(
            f"Last-Event-ID must be the id of an event, got {raw[:40]!r}.", param="Last-Event-ID"
        )
    return int(raw)
