"""Reader: one client's position in a stream; clients read at different speeds.

A reader keeps no frames: what was sent and not read lies in the buffer of its `Connection`
(app.api.http.protocol), whose `ready` is false while it is full. `StreamRegistry` (app.stream.registry)
cuts a reader that stalls. app.api.http.sse is the response that follows a reader; what a client sees at
`ReplayExpired` is there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from app.stream.ring import Ring

MAX_WRITE_BYTES = 64 * 1024


class FrameSink(Protocol):
    """The connection to which a reader sends its frames."""

    def ready(self) -> bool:
        """True if the client keeps up."""
        ...

    def write(self, *frames: bytes) -> None:
        """Send frames in one call. Does nothing after the client has left."""
        ...

    async def caught_up(self) -> None:
        """Wait until the client has caught up, or is gone."""
        ...

    def abort(self) -> None:
        """Cut the connection."""
        ...


class Reader:
    """One client's position in a stream.

    A reader that has sent everything waits. Its stream then has it write the next events into the sink,
    without a task switch. A lagging client, a heartbeat and the end wake the reader's task.
    """

    def __init__(
        self,
        ring: Ring,
        cursor: int,
        now_s: float,
        *,
        frame_after: Callable[[int], tuple[int, bytes]],
        ended: Callable[[], bool],
        on_close: Callable[[Reader], None],
    ) -> None:
        """Read the stream whose events `ring` holds, from the event after `cursor` on.

        `frame_after` makes of an event's id the frame that follows it and the id of that frame's last
        event, or raises ReplayExpired. `ended` is whether no event follows the last.
        """
        self._ring = ring
        self._frame_after = frame_after
        self._ended = ended
        self._on_close = on_close
        self.cursor = cursor
        self.closed = False
        self.sink: FrameSink | None = None
        self.stalling = False
        self._moved = False
        self._moved_at_s = now_s
        self._waiter: asyncio.Future[None] | None = None

    async def follow(self, sink: FrameSink, heartbeat: bytes) -> None:
        """Send all events after the cursor, until the stream ends or the reader is closed.

        Raises ReplayExpired if the client lags so far that its next event has left the ring.
        """
        self.sink = sink
        while not self.at_end():
            if not sink.ready():
                await self.caught_up(sink)
                continue  # the client may have left meanwhile
            if self.cursor == self._ring.last_id:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self.closed:
                return
            if self.cursor != self._ring.last_id:
                self._send(sink, self._ring.last_id)
            elif not self._ended():
                sink.write(heartbeat)
                self._moved = True

    async def caught_up(self, sink: FrameSink) -> None:
        """Wait until a lagging client has caught up. The registry disconnects a client that reads nothing."""
        self.sink = sink
        self.stalling = True
        try:
            await sink.caught_up()
        finally:
            self.stalling = False

    def _send(self, sink: FrameSink, last_id: int) -> None:
        """Send events after the cursor, up to `last_id`, which is beyond it."""
        self._moved = True
        self.cursor, frame = self._frame_after(self.cursor)
        if self.cursor == last_id:
            sink.write(frame)
            return
        frames, size = [frame], len(frame)
        while self.cursor != last_id and size < MAX_WRITE_BYTES:
            self.cursor, frame = self._frame_after(self.cursor)
            frames.append(frame)
            size += len(frame)
        sink.write(*frames)

    def silent_s(self, now_s: float) -> float:
        """Seconds since the last frame was sent, exact to the time since the last call."""
        if self._moved:
            self._moved = False
            self._moved_at_s = now_s
        return now_s - self._moved_at_s

    def at_end(self) -> bool:
        """True if the stream is over and read, or the reader closed."""
        return self.closed or (self._ended() and self.cursor == self._ring.last_id)

    def on_event(self) -> None:
        """Called for each new event: sends it if the reader waits and its client keeps up."""
        sink = self.sink
        if self._waiter is None or sink is None:
            return
        last_id = self._ring.last_id
        try:
            while self.cursor != last_id and sink.ready():
                self._send(sink, last_id)
        except Exception:  # noqa: BLE001  # no other stream may suffer: the reader's own task raises it again
            self.wake()
            return
        if self.cursor != last_id or self.closed or self._ended():
            self.wake()

    def wake(self) -> None:
        """Wake the reader's task: for a heartbeat, a lagging client or the end."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def cut(self) -> None:
        """Leave the stream, and cut the connection: the stream has not ended, and its client is to return."""
        if self.sink is not None:
            self.sink.abort()
        self.close()

    def close(self) -> None:
        """Leave the stream, and wake the reader's task if it waits."""
        self.closed = True
        self._on_close(self)
        self.wake()
