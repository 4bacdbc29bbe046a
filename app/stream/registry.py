"""StreamRegistry: every live and every recently finished stream of the process.

The registry owns the generation tasks, so a client that leaves does not stop its generation. It keeps the
limits of time of streams: the grace period after the last client left, heartbeats, stalled readers,
retention. app.api.http.protocol too cuts a client that reads nothing, after twice `stall_timeout_s`.

Of the three grace periods `_grace_s` chooses between two, `resume_grace_s` and `abandon_grace_s`. The third
is 0: before admission and for whole answers, of clients that cannot return (`Intake.events` and
`Intake.answer` of app.intake.open_stream).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine
from typing import Any

from structlog.typing import FilteringBoundLogger

from app.core import ANY_BODY, ChatRequest, IdempotencyKey
from app.errors import Conflict, Draining, InternalError, Unavailable
from app.log import safe_traceback
from app.settings import Settings
from app.stream.reader import Reader
from app.stream.ring import Ring
from app.stream.token_stream import ABANDONED, DELETED, SHUTDOWN, Outbox, TokenStream, Wire

TICK_BATCH = 128
"""Streams that the ticker checks before it yields to the event loop."""
CONTINUED_S = 5.0
"""Seconds that a continued stream waits at least for its reader, which is about to attach."""


def check_same_body(key: IdempotencyKey, fingerprint: bytes) -> None:
    """Raise Conflict when a key's first request had another body."""
    if key.fingerprint not in (fingerprint, ANY_BODY):
        raise Conflict(
            "This Idempotency-Key was used with another request body; use a new key.",
            code="idempotency_key_reused",
            param="Idempotency-Key",
        )


class StreamRegistry:
    """The process's streams, by id and by idempotency key."""

    def __init__(self, settings: Settings, log: FilteringBoundLogger) -> None:
        self._settings = settings
        self._log = log
        self._outbox = Outbox()
        self._streams: dict[str, TokenStream] = {}
        self._keys: dict[tuple[str, str], TokenStream] = {}
        """Streams by owner and idempotency key."""
        self._live: dict[str, TokenStream] = {}
        self._finished: dict[str, TokenStream] = {}
        self._forgotten: set[TokenStream] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._grace: dict[str, asyncio.TimerHandle] = {}
        self._ticker: asyncio.Task[None] | None = None
        self._draining = False
        self._waiting_ended = asyncio.Event()
        self._live_bytes = 0
        self._finished_bytes = 0
        self._looked_at_all_s = 0.0

    @property
    def num_live(self) -> int:
        """Streams whose generation has not ended."""
        return len(self._live)

    @property
    def num_readers(self) -> int:
        """Clients attached to a stream, live or ended."""
        return sum(len(stream.readers) for stream in (*self._streams.values(), *self._forgotten))

    @property
    def num_retained(self) -> int:
        """Ended streams that are still in memory."""
        return len(self._finished)

    @property
    def live_bytes(self) -> int:
        """Bytes of all live streams, at the last tick."""
        return self._live_bytes

    @property
    def retained_bytes(self) -> int:
        """Bytes that ended streams hold."""
        return self._finished_bytes

    def start(self) -> None:
        """Start the ticker. Needs a running event loop."""
        self._ticker = asyncio.create_task(self._tick(), name="streams-ticker")

    # The life of a stream

    def create(
        self, request: ChatRequest, wire: Wire, *, limit_bytes: int | None = None, unseen: bool = False
    ) -> TokenStream:
        """A new, pending stream, whose ring holds `limit_bytes`. Raises Draining, Unavailable."""
        settings, full = self._settings, ""
        if self._draining:
            raise Draining("The server is stopping; send the request again.", retry_after_s=5)
        if len(self._live) >= settings.max_live_streams:
            full = f"The server already runs {len(self._live)} generations (max_live_streams)."
        elif self._live_bytes > settings.retained_bytes:
            full = f"The running streams hold {self._live_bytes} bytes (retained_bytes); try again."
        if full:
            raise Unavailable(full, code="too_many_streams", retry_after_s=2)
        limit_bytes = limit_bytes or settings.stream_bytes
        ring = Ring(limit_bytes, logprobs=request.logprobs, counts=request.continuous_usage)
        stream = TokenStream(request, wire, ring, unseen=unseen)
        self._add(stream)
        return stream

    def add_continued(self, stream: TokenStream) -> None:
        """Add a stream that another process has begun. It ends if no reader attaches in the grace period.

        Raises Draining.
        """
        if self._draining:
            raise Draining("The server is stopping; try again.", retry_after_s=5)
        if (earlier := self._streams.get(stream.request_id)) is not None:
            self._forget(earlier)  # continued here before, and suspended again
        self._add(stream)
        self._await_readers(stream, max(self._settings.resume_grace_s, CONTINUED_S))

    def is_live(self, request_id: str) -> bool:
        """True if a stream's generation runs."""
        return request_id in self._live

    def _add(self, stream: TokenStream) -> None:
        stream.share_outbox(self._outbox)
        request = stream.request
        self._streams[request.request_id] = self._live[request.request_id] = stream
        if (key := request.idempotency) is not None:
            self._keys[request.owner, key.key] = stream

    def run(self, stream: TokenStream, generation: Coroutine[Any, Any, None]) -> None:
        """Run the stream's generation as a task of its own."""
        task = asyncio.create_task(generation, name=f"generation-{stream.request_id}")
        self._tasks.add(task)
        task.add_done_callback(lambda t: self._ended(stream, t))

    def _ended(self, stream: TokenStream, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if self._draining and not self._tasks:
            self.stop_waiting()
        del self._live[stream.request_id]
        if not task.cancelled() and (exc := task.exception()) is not None:
            self._log.error("generation_broke", request_id=stream.request_id, error=safe_traceback(exc))
        if isinstance(stream.error, Unavailable | InternalError):
            self._free_key(stream)  # its error asks the caller to send the request again
        if stream.refused or stream.suspended:
            self._forget(stream)
        elif stream.request_id in self._streams:  # not deleted meanwhile
            self._finished[stream.request_id] = stream
            self._finished_bytes += stream.nbytes
        self._cancel_grace(stream)

    def _forget(self, stream: TokenStream) -> None:
        if self._streams.pop(stream.request_id, None) is not None and stream.readers:
            self._forgotten.add(stream)
        if self._finished.pop(stream.request_id, None) is not None:
            self._finished_bytes -= stream.nbytes
        self._free_key(stream)

    def _free_key(self, stream: TokenStream) -> None:
        owner, key = stream.request.owner, stream.request.idempotency
        if key is not None and self._keys.get((owner, key.key)) is stream:
            del self._keys[owner, key.key]

    def delete(self, stream: TokenStream) -> None:
        """Drop a finished stream before its retention ends; a live one is cancelled first."""
        stream.cancel(DELETED)
        self._forget(stream)

    def delete_conversation(self, conversation_id: str) -> None:
        """Cancel the answers of a conversation, and drop its streams from memory.

        Their text is stored, and readable again after the conversation is restored.
        """
        for stream in list(self._streams.values()):
            if stream.request.conversation_id == conversation_id:
                stream.cancel("cancelled")
                self._forget(stream)

    # Finding one

    def conversations_in_progress(self, owner: str) -> set[str | None]:
        """The ids of an owner's conversations in which an answer is being generated."""
        requests = (stream.request for stream in self._live.values())
        return {request.conversation_id for request in requests if request.owner == owner}

    def find(self, request_id: str, owner: str) -> TokenStream | None:
        """The caller's stream of that id, if it is in memory."""
        stream = self._streams.get(request_id)
        if stream is None or stream.request.owner != owner or stream.refused or stream.suspended:
            return None
        return stream

    def cancel_live(self, request_id: str, reason: str) -> bool:
        """Cancel a stream of any owner. Returns whether one of that id is live."""
        stream = self._live.get(request_id)
        if stream is not None:
            stream.cancel(reason)
        return stream is not None

    def find_by_key(self, owner: str, key: IdempotencyKey) -> TokenStream | None:
        """The stream in memory that was made with this key; None if there is none.

        Raises Conflict where the key was used with another body.
        """
        stream = self._keys.get((owner, key.key))
        if stream is None or stream.request.idempotency is None:
            return None
        check_same_body(key, stream.request.idempotency.fingerprint)
        return None if stream.suspended else stream

    # Readers that leave

    def leave(self, stream: TokenStream, reader: Reader, *, grace_s: float | None = None) -> None:
        """Detach a stream's reader. When it was the last, the generation ends after the grace period.

        That is short where nothing says that the client will return, as after a user pressed Stop. `grace_s`
        replaces it: 0 where a client leaves for good before admission, or leaves a whole answer for good.
        """
        reader.close()
        if stream.done or stream.readers:
            return
        self._await_readers(stream, self._grace_s(stream) if grace_s is None else grace_s)

    def _grace_s(self, stream: TokenStream) -> float:
        settings = self._settings
        if stream.resumable:
            return settings.resume_grace_s
        return min(settings.abandon_grace_s, settings.resume_grace_s)

    def grace_left_s(self, request_id: str) -> float | None:
        """Seconds until an unread stream is stopped, 0 where it was; None where nothing stops it."""
        stream, timer = self._streams.get(request_id), self._grace.get(request_id)
        if stream is not None and stream.cancelled is not None:
            return 0.0
        if stream is None or stream.readers or timer is None:
            return None
        return max(0.0, timer.when() - asyncio.get_running_loop().time())

    def _await_readers(self, stream: TokenStream, grace_s: float) -> None:
        self._cancel_grace(stream)
        if grace_s <= 0:
            stream.cancel(ABANDONED)
            return
        loop = asyncio.get_running_loop()
        self._grace[stream.request_id] = loop.call_later(grace_s, self._grace_over, stream)

    def abort_unread(self, model: str) -> str | None:
        """Stop the model's stream that has been unread longest. Returns its id; None if there is none."""
        for request_id in self._grace:
            stream = self._streams.get(request_id)
            if stream is None or stream.readers or stream.done or stream.cancelled is not None:
                continue  # it is read again, or has ended, or will end
            if stream.request.model == model:
                self._log.info("unread_aborted", request_id=request_id)
                stream.cancel(ABANDONED)
                return request_id
        return None

    def _grace_over(self, stream: TokenStream) -> None:
        self._grace.pop(stream.request_id, None)
        if not stream.readers:
            stream.cancel(ABANDONED)

    def _cancel_grace(self, stream: TokenStream) -> None:
        timer = self._grace.pop(stream.request_id, None)
        if timer is not None:
            timer.cancel()

    # Time

    async def _tick(self) -> None:
        settings = self._settings
        period_s = min(settings.heartbeat_s, settings.stall_timeout_s, 1.0) / 2
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(period_s)
            try:
                await self._look_after_readers(loop.time())
                self._forget_old(loop.time())
            except Exception as exc:  # noqa: BLE001  # heartbeats and retention must continue
                self._log.error("ticker_broke", error=safe_traceback(exc))

    async def _look_after_readers(self, now_s: float) -> None:
        """Wake silent readers for a heartbeat, and disconnect stalled readers.

        Finished streams, of which there may be very many, are checked once a second.
        """
        streams = list(self._live.values())
        num_live, live_bytes = len(streams), 0
        if now_s - self._looked_at_all_s >= 1.0:
            self._looked_at_all_s = now_s
            self._forgotten = {stream for stream in self._forgotten if stream.readers}
            streams += [*self._finished.values(), *self._forgotten]
        for number, stream in enumerate(streams, start=1):
            if number % TICK_BATCH == 0:
                await asyncio.sleep(0)
            if number <= num_live:
                live_bytes += stream.nbytes
            self._look_after(stream, now_s)
        self._live_bytes = live_bytes

    def _look_after(self, stream: TokenStream, now_s: float) -> None:
        for reader in list(stream.readers):
            silent_s = reader.silent_s(now_s)
            if not reader.stalling:
                if silent_s >= self._settings.heartbeat_s:
                    reader.wake()
            elif silent_s > self._settings.stall_timeout_s and reader.sink is not None:
                self._log.warning("reader_stalled", request_id=stream.request_id, silent_s=silent_s)
                reader.sink.abort()

    def _forget_old(self, now_s: float) -> None:
        """Drop finished streams past their retention, then the oldest over the memory limit."""
        while self._finished:
            oldest = next(iter(self._finished.values()))
            age_s = now_s - (oldest.finished_at_s or now_s)
            full = self._finished_bytes > self._settings.retained_bytes
            if age_s < self._settings.retention_s and not full:
                return
            self._forget(oldest)

    # Stopping

    async def drain(self, timeout_s: float, reason: str = SHUTDOWN) -> None:
        """Refuse new streams, let live streams finish within `timeout_s`, then cancel the others."""
        self._draining = True
        if self._tasks:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._waiting_ended.wait(), timeout_s)
        for stream in list(self._live.values()):
            is_lost = stream.unreleased and not stream.resumable  # its client has no way to ask for it again
            stream.cancel(SHUTDOWN if is_lost else reason)
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=5)
        for task in self._tasks:
            task.cancel()

    def stop_waiting(self) -> None:
        """Make `drain` end the live streams at once."""
        self._waiting_ended.set()

    async def aclose(self) -> None:
        """Stop the ticker. A second call does nothing."""
        if self._ticker is not None:
            self._ticker.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._ticker
            self._ticker = None
