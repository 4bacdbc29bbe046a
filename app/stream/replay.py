"""A stored stream as a `TokenStream`, to which readers attach as to a live stream.

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


def replayed(
    stored: StoredStream, wire_factory: Callable[[ChatRequest], Wire], limit_bytes: int, after: int
) -> TokenStream:
    """The finished stream of a stored one, for a reader that has received event `after`.

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
        wire = _HeldEnd(wire)
        ring.append_control(Failed(error.as_body()))
        ring.append_control(Done())
    return TokenStream.from_store(request, wire, ring, usage, error)


class _HeldEnd:
    """The wire of an interrupted stream, which gives its end the ids from `END_ID` on."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire

    def text(self, event_id: int, track: TextTrack, text: bytes) -> bytes:
        return self._wire.text(event_id, track, text)

    def delta(self, last_id: int, parts: Sequence[TextRun]) -> bytes:
        return self._wire.delta(last_id, parts)

    def control(self, event_id: int, event: ControlEvent) -> bytes:
        if isinstance(event, Failed):
            event_id = END_ID
        elif isinstance(event, Done):
            event_id = END_ID + 1
        return self._wire.control(event_id, event)


def _ring(stored: StoredStream, limit_bytes: int) -> Ring:
    if stored.state != "settled":  # nor in memory: this process has just started and will settle it soon
        raise StorageUnavailable("The answer is being settled after a restart; try again.", retry_after_s=1)
    if not stored.segments and not stored.reconciled:
        raise NotFound(f"No stream {stored.request_id!r}: it never began.", code="stream_not_found")
    try:
        return Ring.restore(stored.segments, limit_bytes)
    except ValueError as exc:
        raise InternalError("The stored events of this answer are damaged.") from exc


_FACTS = (
    "n",
    "include_usage",
    "continuous_usage",
    "logprobs",
    "created_at_unix_s",
    "conversation_id",
    "message_id",
)


def stream_facts(request: ChatRequest) -> bytes:
    """The JSON object from which a replay writes the stream's frames again."""
    return orjson.dumps({name: getattr(request, name) for name in _FACTS})


def _request(stored: StoredStream) -> ChatRequest:
    facts = orjson.loads(stored.stream)
    fields = {name: facts[name] for name in _FACTS}
    return ChatRequest(stored.request_id, stored.owner, stored.model, {}, **fields)


def _interrupted(last_event_id: int, usage: Mapping[str, Any]) -> Interrupted:
    return Interrupted(
        "The server died while it answered; the stored part of the answer has been sent."
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
    return _class_of(code)(error["message"], code=code, param=error["param"])


def _class_of(code: str) -> type[ServingError]:
    """The error class with this default code, else a class with the status of the code."""
    kinds = [kind for kind in _tree(ServingError) if kind.status == CODES[code].status]
    return next((kind for kind in kinds if kind.default_code == code), kinds[0])


def _tree(kind: type[ServingError]) -> Iterator[type[ServingError]]:
    yield kind
    for narrower in kind.__subclasses__():
        yield from _tree(narrower)
