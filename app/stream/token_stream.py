"""TokenStream: what one generation has released, and the readers that follow it.

The generation writes events, and any number of readers send them to clients. What was written in one tick of
the event loop is sent in the next one, in one frame: while the loop keeps up, a frame has one token. A reader
that lags gets several events in one frame too, without a gap, and does not slow other readers.
`StreamRegistry` owns every live and every recently finished stream of the process (app.stream.registry).
`Pipeline.serve` writes and `EngineRun` opens (app.pipeline); `cancel` calls what a stage set by `on_cancel`.

    PENDING ──open()──▶ OPEN ──close()/fail()──▶ DONE
       │                 ├──suspend()──────────▶ DONE (suspended: another process continues it)
       └──────fail()─────────────────────────────▶ DONE (refused: no event was ever sent)
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from app.core import ChatRequest, Counts, Delta, FinishReason, Usage, total_counts
from app.errors import (
    Cancelled,
    Draining,
    ReplayExpired,
    ReplayPositionUnknown,
    ServingError,
    StorageUnavailable,
)
from app.store.usage import usage_body
from app.stream.reader import Reader
from app.stream.ring import (
    ControlEvent,
    Done,
    ExtraChunk,
    Failed,
    Finished,
    Opened,
    Ring,
    TextEvent,
    TextRun,
    TextTrack,
    ToolStarted,
)

ABANDONED = "disconnect"
"""Reason to cancel: the client has left, and has not returned in time."""
SHUTDOWN = "shutdown"
"""Reason to cancel: the server stops. The stream ends in an error event that says so."""
SUSPENDED = "suspended"
"""Reason to cancel: the server stops, and another process is to continue the stream."""
DELETED = "deleted"
"""Reason to cancel: the answer was deleted, and its text must not be stored."""
ADMIN = "admin"
"""Reason to cancel: an admin has stopped it, as its owner might have."""
STORAGE = "storage"
"""Reason to cancel: the store cannot be written any more."""


class Wire(Protocol):
    """Writes events as the bytes of frames."""

    def text(self, event_id: int, track: TextTrack, text: bytes) -> bytes:
        """One frame with the escaped text of one event, without log probabilities and counts."""
        ...

    def delta(self, last_id: int, parts: Sequence[TextRun]) -> bytes:
        """One frame with `parts`; its id is `last_id`."""
        ...

    def control(self, event_id: int, event: ControlEvent) -> bytes:
        """One frame with a control event."""
        ...


class Outbox:
    """The streams that have unsent events: sent together, one tick of the event loop after the first."""

    __slots__ = ("_unsent",)

    def __init__(self) -> None:
        self._unsent: dict[TokenStream, None] = {}

    def add(self, stream: TokenStream) -> None:
        """Send the stream's events in the next tick."""
        if not self._unsent:
            asyncio.get_running_loop().call_soon(self._send)
        self._unsent[stream] = None

    def _send(self) -> None:
        unsent, self._unsent = self._unsent, {}
        for stream in unsent:
            stream.wake()


class TokenStream:
    """One generation's released events, from the first to `[DONE]`."""

    def __init__(self, request: ChatRequest, wire: Wire, ring: Ring, *, unseen: bool = False) -> None:
        self.request = request
        self.resumable = request.resumable
        """True if a client that leaves may return: its request says so, or it has returned before."""
        self.unseen = unseen
        """True while nobody is sent events of it: its client waits for the whole answer."""
        self.readers: set[Reader] = set()
        self.cancelled: str | None = None
        self.error: ServingError | None = None
        self.suspended = False
        """True if it has ended in this process only, and another one is to continue it."""
        self.finished_at_s: float | None = None
        self.usage: Mapping[str, Any] | None = None
        self._wire = wire
        self._ring = ring
        self._text_only = ring.text_only
        self._abort: Callable[[], None] | None = None
        self._frame: tuple[int, int, bytes] = (-1, -1, b"")
        self._newest: TextEvent = (0, TextTrack(0, "text"), b"")
        self._outbox = Outbox()
        loop = asyncio.get_running_loop()
        self._now_s = loop.time
        self._opened: asyncio.Future[None] = loop.create_future()
        self._done: asyncio.Future[None] = loop.create_future()

    @classmethod
    def from_store(
        cls,
        request: ChatRequest,
        wire: Wire,
        ring: Ring,
        usage: Mapping[str, Any],
        error: ServingError | None,
    ) -> TokenStream:
        """A stream that was opened and has ended, with all its events in `ring`."""
        stream = cls(request, wire, ring)
        stream._restore(usage, error)
        return stream

    def _restore(self, usage: Mapping[str, Any], error: ServingError | None) -> None:
        self.usage, self.error = usage, error
        self._opened.set_result(None)
        self._finish()

    @classmethod
    def continued(
        cls,
        request: ChatRequest,
        wire: Wire,
        ring: Ring,
        counts: Mapping[int, Counts],
        *,
        unseen: bool = False,
    ) -> TokenStream:
        """A live stream that was opened in another process, with its events in `ring`.

        `counts` are those of each choice at the last of them.
        """
        stream = cls(request, wire, ring, unseen=unseen)
        ring.continue_from(counts)
        stream._opened.set_result(None)
        return stream

    @property
    def request_id(self) -> str:
        return self.request.request_id

    # Writing: the generation's side.

    def open(self, n: int) -> None:
        """Let the status line out, unless it is. Raises Cancelled, Draining, StorageUnavailable."""
        self.check_wanted()
        if not self._opened.done():
            self._append_control(Opened(n))
            self._opened.set_result(None)

    def check_wanted(self) -> None:
        """Raise Cancelled, Draining or StorageUnavailable if the stream was cancelled."""
        self.check_not_stopping()
        if self.cancelled is not None:
            raise Cancelled("The request was cancelled while it waited.")

    def check_not_stopping(self) -> None:
        """Raise Draining if the server stops, or StorageUnavailable if the answer cannot be stored."""
        if self.cancelled in (SHUTDOWN, SUSPENDED):
            raise Draining("The server is stopping; send the request again.", retry_after_s=5)
        if self.cancelled == STORAGE:
            raise StorageUnavailable("The answer can no longer be stored, so it was stopped.")

    def on_cancel(self, abort: Callable[[], None]) -> None:
        """Call `abort` when the stream is cancelled; at once if it is cancelled already.

        It replaces the one before: `Admission.withdraw` while the request waits, `Engine.abort` from
        `EngineRun` on (app.pipeline), and in between one that does nothing.
        """
        self._abort = abort
        if self.cancelled is not None:
            abort()

    def append(self, delta: Delta) -> None:
        """Release a delta to the readers."""
        tool = delta.tool
        if tool is not None and tool.name is not None:
            self._ring.append_control(ToolStarted(delta.choice, tool))
        if delta.text or delta.logprobs:
            self._newest = self._ring.append(delta)
        if delta.finish_reason is not None:
            self._ring.append_control(Finished(delta.choice, delta.finish_reason, delta.matched_stop))
        if self.readers:
            self._outbox.add(self)

    def extra_chunk(self, field: str, value: Mapping[str, Any]) -> None:
        """Release a chunk without choices."""
        self._ring.append_control(ExtraChunk(field, value))
        self._outbox.add(self)

    def conclude(self, usage: Usage, moderation: Mapping[str, Any] | None) -> None:
        """Release the chunks after the last token: moderation and usage."""
        if moderation is not None:
            self.extra_chunk("moderation", moderation)
        self.usage = usage_body(usage)
        if self.request.include_usage:
            self.extra_chunk("usage", self.usage)

    def close(self) -> None:
        """End the stream with [DONE]."""
        self._append_control(Done())
        self._finish()

    def fail(self, error: ServingError) -> None:
        """End the stream in an error: before `open` as a refusal, after it as an error event."""
        self.error = error
        error.forget_frames()
        if not self._opened.done():
            self._opened.set_exception(error)
            self._opened.exception()  # retrieved: no task may await it
            self._finish()
            return
        if self.unreleased:  # it is not billed, so nobody is to get it later either
            self._ring = self._ring.emptied()
            self._newest = (0, TextTrack(0, "text"), b"")
        self._ring.append_control(Failed(error.as_body()))
        self.close()

    def suspend(self, error: ServingError) -> None:
        """End the stream in this process only. Its clients' connections are cut, so that they return.

        A client that waits for the whole answer gets `error`.
        """
        self.suspended = True
        self.error = error
        for reader in list(self.readers):
            reader.cut()
        self._finish()

    def _append_control(self, event: ControlEvent) -> None:
        self._ring.append_control(event)
        self.wake()

    def _finish(self) -> None:
        # The prompt is no longer needed: a retained stream must not hold it.
        self.request = dataclasses.replace(self.request, body={}, raw=None)
        self.finished_at_s = self._now_s()
        self._done.set_result(None)
        self.wake()

    def share_outbox(self, outbox: Outbox) -> None:
        """Have events sent together with those of other streams."""
        self._outbox = outbox

    def wake(self) -> None:
        """Have the readers send what they have not sent."""
        for reader in tuple(self.readers):
            reader.on_event()

    # Reading: the clients' side.

    @property
    def done(self) -> bool:
        return self._done.done()

    @property
    def refused(self) -> bool:
        """True if the stream ended before it was opened."""
        return self._opened.done() and self._opened.exception() is not None

    @property
    def unreleased(self) -> bool:
        """True if its text has reached nobody, no conversation either."""
        return self.unseen and self.request.conversation_id is None

    @property
    def suspending(self) -> bool:
        """True if it is to be suspended."""
        return self.cancelled == SUSPENDED

    @property
    def status_unsent(self) -> bool:
        """True until the status line is out: the request waits for admission, or its prompt's verdict."""
        return not self._opened.done()

    @property
    def last_id(self) -> int:
        return self._ring.last_id

    @property
    def nbytes(self) -> int:
        return self._ring.nbytes

    def dump(self, after: int, *, done: bool = False) -> tuple[int, bytes] | None:
        """The events after id `after` as the store keeps them, and the first one's id; see Ring.dump."""
        return self._ring.dump(after, done=done)

    def finish_reasons(self) -> dict[int, FinishReason]:
        """The finish reasons of the choices that have ended, as far as they are still in the ring."""
        _, events = self.in_ring()
        return {event.choice: event.finish_reason for event in events if isinstance(event, Finished)}

    def in_ring(self) -> tuple[Mapping[TextTrack, TextRun], Sequence[ControlEvent]]:
        """The text by track and the control events that are still in the ring."""
        return self._ring.contents()

    async def status_sent(self) -> None:
        """Wait until the status line is out. Raises the ServingError the request was refused with."""
        await asyncio.shield(self._opened)

    async def ended(self) -> None:
        """Wait for the last event. Raises the ServingError that a suspended stream has."""
        await asyncio.shield(self._done)
        self._check_not_suspended()

    def _check_not_suspended(self) -> None:
        if self.suspended and self.error is not None:
            raise self.error

    def cancel(self, reason: str) -> None:
        """Stop the generation; its text so far is kept. A later call does nothing, except with `DELETED`.

        DELETED also counts after the end, because the settlement may not be written yet.
        """
        if self.done or self.cancelled is not None:
            if reason == DELETED:
                self.cancelled = DELETED
            return
        self.cancelled = reason
        if self._abort is not None:
            self._abort()

    def expect_return(self) -> None:
        """Note that a client has returned to it, and so may do it again."""
        self.resumable = True

    def note_seen(self) -> None:
        """Note that a client is sent events of it. What failed unseen stays so: it has no text."""
        self.unseen = self.unseen and self.done

    def attach(self, after: int = 0) -> Reader:
        """A reader of the events after id `after`.

        Raises ReplayPositionUnknown beyond what was ever sent, ReplayExpired for events that
        have left the ring, and the ServingError that a suspended stream has.
        """
        self._check_not_suspended()
        self.check_sent(after)
        self._check_held(after)
        reader = Reader(
            self._ring,
            after,
            self._now_s(),
            frame_after=self.frame_after,
            ended=self._done.done,
            on_close=self.readers.discard,
        )
        self.readers.add(reader)
        return reader

    def check_sent(self, after: int) -> None:
        """Raise ReplayPositionUnknown for an event id beyond what was ever sent."""
        if after > self._ring.last_id:
            raise ReplayPositionUnknown(
                f"Last-Event-ID {after} was never sent: the stream's last event is"
                f" {self._ring.last_id}. Send the id of the last event you received.",
                param="Last-Event-ID",
            )

    def _check_held(self, cursor: int) -> None:
        if cursor + 1 < self._ring.first_id:
            raise ReplayExpired(
                f"Events up to {self._ring.first_id - 1} of this stream are no longer held;"
                f" the earliest position is Last-Event-ID {self._ring.first_id - 1}.",
                param="Last-Event-ID",
            )

    def frame_after(self, cursor: int) -> tuple[int, bytes]:
        """The frame after event `cursor`, and the id of its last event. Raises ReplayExpired.

        The newest frame is built once, for all readers at this position.
        """
        start, last_id, frame = self._frame
        if start == cursor:
            return last_id, frame
        event_id, track, text = self._newest
        if event_id == cursor + 1 and self._text_only:  # most frames
            frame = self._wire.text(event_id, track, text)
            self._frame = (cursor, event_id, frame)
            return event_id, frame
        self._check_held(cursor)
        last_id, content = self._ring.after(cursor, joined=not self._ring.is_one_step(cursor))
        if isinstance(content, Sequence):
            frame = self._wire.delta(last_id, content)
        else:
            frame = self._wire.control(last_id, content)
        self._frame = (cursor, last_id, frame)
        return last_id, frame

    def whole(self) -> tuple[Mapping[TextTrack, TextRun], Sequence[ControlEvent]]:
        """All text by track and control events so far, for a whole answer. Raises ReplayExpired."""
        self._check_held(0)
        return self._ring.contents()


def usage_of(counts: Mapping[int, Counts]) -> dict[str, Any]:
    """OpenAI's usage object for the counts so far, by choice. The prompt counts once."""
    return usage_body(Usage(*total_counts(counts)))


def first_of(counts: Mapping[int, Counts]) -> Counts:
    """The counts of the lowest choice that has begun. All choices have the same counts of the prompt."""
    return counts[min(counts)] if counts else Counts()
