"""The head of a request for an answer: what its headers ask for. Read before its body."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

from starlette.requests import Request

from app.core import Key
from app.errors import BadRequest, ReplayPositionUnknown
from app.routing.router import Size

PLAIN_EVENTS = "x-plain-events"
PLAIN_VALUES = ("0", "1")
_YES, _NO = ("1", "true"), ("0", "false")


@dataclass(frozen=True, slots=True)
class Head:
    """The wishes of a request, by its headers and its key's terms."""

    idempotency_key: str | None
    last_event_id: int
    """The last event that the client has received; 0 without any."""
    resumable: bool | None
    """The result of `may_resume`."""
    data_lines_only: bool
    """Events are to be sent as `data:` lines only."""
    route: Size | None
    """The model of the two that the caller asks for, if any."""
    no_degrade: bool
    """The request is to be served as it was asked for, or refused: never in degraded mode."""
    traceparent: str
    """The caller's trace; OpenTelemetry ignores a wrong one."""

    @classmethod
    def of(cls, request: Request, key: Key | None) -> Head:
        """Raises BadRequest and ReplayPositionUnknown, naming the header."""
        # In one pass: each of Starlette's look-ups goes through all. Of two of a name the first counts.
        headers = dict(reversed(request.headers.items()))
        idempotency_key = headers.get("idempotency-key")
        if idempotency_key is not None and not 0 < len(idempotency_key) <= 255:
            raise BadRequest("Idempotency-Key must have 1 to 255 characters.", param="Idempotency-Key")
        named = headers.get("x-route")
        if named not in (None, *get_args(Size)):
            raise BadRequest(f"x-route must be small or large, got {named!r}.", param="x-route")
        no_degrade = _yes_or_no(headers, "x-no-degrade")
        return cls(
            idempotency_key,
            last_event_id(request),
            may_resume(headers, key),
            wants_data_lines_only(headers),
            next((size for size in get_args(Size) if size == named), None),
            (key is not None and key.terms.degrade == "off") if no_degrade is None else no_degrade,
            headers.get("traceparent", ""),
        )

    def check_nothing_received(self) -> None:
        """Refuse to start a generation for a client that believes it has received a part of it.

        Raises ReplayPositionUnknown.
        """
        if self.last_event_id:
            raise ReplayPositionUnknown(
                f"Last-Event-ID {self.last_event_id} was never sent: there is no generation under this"
                " request's Idempotency-Key. Attach with GET and the id of the answer, or send no"
                " Last-Event-ID.",
                param="Last-Event-ID",
            )


def may_resume(headers: Mapping[str, str], key: Key | None) -> bool | None:
    """True where the client of a new answer may return to it, as the head of its request or its key says.

    None where neither says so: then a stored answer is resumable, and no other. Raises BadRequest.
    """
    if (asked := _yes_or_no(headers, "x-resume")) is not None:
        return asked
    signs = "idempotency-key" in headers or "last-event-id" in headers
    return True if signs or (key is not None and key.terms.resume == "always") else None


def last_event_id(request: Request) -> int:
    """The last event that the client has received; 0 without any. Raises ReplayPositionUnknown."""
    raw: Any = request.headers.get("last-event-id")
    if raw is None and request.scope["query_string"]:
        raw = request.query_params.get("last_event_id")
    if raw is None or raw == "":
        return 0
    if not (raw.isascii() and raw.isdigit() and len(raw) < 16):
        raise ReplayPositionUnknown(
            f"Last-Event-ID must be the id of an event, got {raw[:40]!r}.", param="Last-Event-ID"
        )
    return int(raw)


def wants_data_lines_only(headers: Mapping[str, str]) -> bool:
    """True where the request asks for `data:` lines only. Raises BadRequest."""
    sent = headers.get(PLAIN_EVENTS, "0")
    if sent not in PLAIN_VALUES:
        raise BadRequest(f"{PLAIN_EVENTS} must be 1 or 0, got {sent[:40]!r}.", param=PLAIN_EVENTS)
    return sent == "1"


def _yes_or_no(headers: Mapping[str, str], name: str) -> bool | None:
    """The value of a header; None where it is not there. Raises BadRequest."""
    sent = headers.get(name)
    if sent not in (None, *_YES, *_NO):
        raise BadRequest(f"{name} must be 1 or 0, got {sent[:40]!r}.", param=name)
    return None if sent is None else sent in _YES
