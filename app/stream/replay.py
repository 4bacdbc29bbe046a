"""Replay: a stored stream as a `TokenStream`, to which readers attach as to a live stream.

A stream that had ended is replayed as it was. If its process died, the replay has the checkpointed events,
then an error event with the counts and the id of the last stored event, then [DONE].

A client of such a stream may have received events that were not checkpointed. It gets the error event and
[DONE] alone. These two have ids that no live event has (`END_ID`). With the next free ids, a returning client
that names such an id could have received either a lost event or the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import orjson

from app.core import ChatRequest
from app.errors import CODES, InternalError, Interrupted, NotFound, ServingError, StorageUnavailable
from app.store.events import StoredStream
from app.store.usage import usage_body
from app.stream.ring import ControlEvent, Done, Failed, Ring, TextRun, TextTrack
from app.stream.token_stream import TokenStream, Wire

END_ID = 900_000_000_000_000
"""Id of the error event of an interrupted stream; its [DONE] has the next id. No live stream gets so far."""


def revive(
    stored: StoredStream, wire_factory: Callable[[ChatRequest], Wire], limit_bytes: int, after: int
) -> TokenStream:
    """The finished stream, for a reader that has received event `after`.

    Raises NotFound if the request was refused, StorageUnavailable if it is not settled yet, and
    InternalError if its events are damaged.
    """
    ring = _ring(stored, limit_bytes)
    request = _request(stored)
    wire = wire_factory(request)
    usage = usage_body(stored.usage)
    if ring.last == Done():
        error = _error(ring)
    else:
        error = _interrupted(ring.last_id, usage)
        if after > ring.last_id:
            ring = Ring(limit_bytes, first_id=min(after + 1, END_ID))
        wire = _EndApart(wire)
        ring.append_special(Failed(error.as_body()))
        ring.append_special(Done())
    return TokenStream.finished(request, wire, ring, usage=usage, error=error)


class _EndApart:
    """The wire of an interrupted stream, which gives its end the ids from `END_ID` on."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def text(self, event_id: int, track: TextTrack, text: bytes) -> bytes:
        return self._wire.text(event_id, track, text)

    def delta(self, last_id: int, parts: Sequence[TextRun]) -> bytes:
        return self._wire.delta(last_id, parts)

    def special(self, event_id: int, event: ControlEvent) -> bytes:
        if isinstance(event, Failed):
            event_id = END_ID
        elif isinstance(event, Done):
            event_id = END_ID + 1
        return self._wire.special(event_id, event)


def _ring(stored: StoredStream, limit_bytes: int) -> Ring:
    if stored.state != "settled":  # nor in memory: this process has just started and will settle it soon
        raise StorageUnavailable("The answer is being settled after a restart; try again.", retry_after_s=1)
    if not stored.segments and not stored.reconciled:
        raise NotFound(f"No stream {stored.request_id!r}: it never began.", code="stream_not_found")
    try:
        return Ring.restore(stored.segments, limit_bytes)
    except ValueError as exc:
        raise InternalError("The stored events of this answer are damaged.") from exc


def _request(stored: StoredStream) -> ChatRequest:
    facts = orjson.loads(stored.stream)
    return ChatRequest(
        request_id=stored.request_id,
        owner=stored.owner,
        model=stored.model,
        body={},
        created_at_unix_s=facts["created_at_unix_s"],
        n=facts["n"],
        include_usage=facts["include_usage"],
        continuous_usage=facts["continuous_usage"],
        logprobs=facts["logprobs"],
        conversation_id=facts["conversation_id"],
        message_id=facts["message_id"],
    )


def _interrupted(last_event_id: int, usage: Mapping[str, Any]) -> Interrupted:
    return Interrupted(
        "The server died while it answered; what is known of the answer has been sent."
        " Send the request again for another.",
        {"last_event_id": last_event_id, "usage": usage},
    )


def _error(ring: Ring) -> ServingError | None:
    """The error in the event before [DONE]; None if the stream ended without one."""
    if ring.last_id == ring.first_id:
        return None
    _, event = ring.after(ring.last_id - 2)
    if not isinstance(event, Failed):
        return None
    error = event.body["error"]
    code: str = error["code"]
    return _kind(code)(error["message"], code=code, param=error["param"])


def _kind(code: str) -> type[ServingError]:
    """The error class with this default code, else a class with the status of the code."""
    kinds = list(_tree(ServingError))
    status = CODES[code].status
    return next((k for k in kinds if k.default_code == code), None) or next(
        k for k in kinds if k.status == status
    )


def _tree(kind: type[ServingError]) -> Iterator[type[ServingError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _tree(narrower)
