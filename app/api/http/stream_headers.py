"""The headers by which a client finds its stream again, and those that tell it of a stream."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request

from app.api.http.json_body import fingerprint
from app.core import IdempotencyKey, Key
from app.errors import BadRequest, ReplayPositionUnknown
from app.stream.token_stream import TokenStream

RESUME = "x-resume"
_YES, _NO = ("1", "true"), ("0", "false")


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


def yes_or_no(request: Request, name: str) -> bool | None:
    """What a header asks for; None where it is not there. Raises BadRequest."""
    sent = request.headers.get(name)
    if sent not in (None, *_YES, *_NO):
        raise BadRequest(f"{name} must be 1 or 0, got {sent[:40]!r}.", param=name)
    return None if sent is None else sent in _YES


def may_resume(request: Request, key: Key | None) -> bool | None:
    """Whether the client of a new answer may come back to it, as the head of its request or its key says.

    None where neither says it. Raises BadRequest.
    """
    if (asked := yes_or_no(request, RESUME)) is not None:
        return asked
    signs = "idempotency-key" in request.headers or "last-event-id" in request.headers
    return True if signs or (key is not None and key.terms.resume == "always") else None


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
