"""Reader: one client's way through a stream, at its own pace."""

from __future__ import annotations

import asyncio
from typing import Protocol

from app.errors import ReplayExpired

MAX_WRITE_BYTES = 64 * 1024


class Followed(Protocol):
    """The stream that a reader follows (app.stream.token_stream.TokenStream)."""

    readers: set[Reader]

    @property
    def request_id(self) -> str:
        """The request's that it answers."""
        ...

    @property
    def last_id(self) -> int:
        """The newest event's."""
        ...

    @property
    def done(self) -> bool:
        """Whether nothing follows it."""
        ...

    def cancel(self, reason: str) -> None:
        """Stop the generation."""
        ...

    def frame_after(self, cursor: int) -> tuple[int, bytes]:
        """The frame that follows event `cursor`, and the id of its last event. Raises ReplayExpired."""
        ...


class FrameSink(Protocol):
    """The connection to which a reader sends its frames."""

    def ready(self) -> bool:
        """Whether the client keeps up."""
        ...

    def write(self, *frames: bytes) -> None:
        """Send now, in one go; nothing happens once the client is gone."""
        ...

    async def drained(self) -> None:
        """Wait until the client has caught up, or is gone."""
        ...

    def abort(self) -> None:
        """Cut the connection."""
        ...


class Reader:
    """One client's position in a stream.

    A reader that has everything parks in `wait()`. The next event then goes from the
    generation's own task straight into the outlet, without a task switch; only a lagging
    client, a heartbeat and the end wake the reader's task.
    """

    __slots__ = ("_moved", "_moved_at_s", "_waiter", "closed", "cursor", "outlet", "stalling", "stream")

    def __init__(self, stream: Followed, cursor: int, now_s: float) -> None:
        self.stream = stream
        self.cursor = cursor
        self.closed = False
        self.outlet: FrameSink | None = None
        self.stalling = False
        self._moved = False
        self._moved_at_s = now_s
        self._waiter: asyncio.Future[None] | None = None

    async def follow(self, outlet: FrameSink, heartbeat: bytes) -> None:
        """Send everything from the cursor on, until the stream ends or the reader is closed.

        Raises ReplayExpired when the client lags so far that events have left the ring.
        """
        self.outlet = outlet
        while not self.at_end():
            if not outlet.ready():
                await self.caught_up(outlet)
                continue  # the client may have left meanwhile
            if self.cursor == self.stream.last_id:
                await self._wait()
            if not self.closed:
                self._send(heartbeat)

    async def caught_up(self, outlet: FrameSink) -> None:
        """Wait for a client that lags; one that reads nothing meanwhile is cut by the registry."""
        self.outlet = outlet
        self.stalling = True
        try:
            await outlet.drained()
        finally:
            self.stalling = False

    def _send(self, idle: bytes = b"") -> None:
        """Send what has come, or `idle` when nothing has and the stream goes on."""
        assert self.outlet is not None
        last_id = self.stream.last_id
        if self.cursor != last_id:
            self.cursor, frame = self.stream.frame_after(self.cursor)
            if self.cursor == last_id:
                self.outlet.write(frame)
            else:
                self._send_several(frame, last_id)
        elif not self.at_end():
            self.outlet.write(idle)
        self._moved = True

    def _send_several(self, frame: bytes, last_id: int) -> None:
        assert self.outlet is not None
        frames, size = [frame], len(frame)
        while self.cursor != last_id and size < MAX_WRITE_BYTES:
            self.cursor, frame = self.stream.frame_after(self.cursor)
            frames.append(frame)
            size += len(frame)
        self.outlet.write(*frames)

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def silent_s(self, now_s: float) -> float:
        """Seconds without a frame sent, to within the time since the last call."""
        if self._moved:
            self._moved = False
            self._moved_at_s = now_s
        return now_s - self._moved_at_s

    def at_end(self) -> bool:
        """Whether the stream is over and read, or the reader closed."""
        return self.closed or (self.stream.done and self.cursor == self.stream.last_id)

    def on_event(self) -> None:
        """Take note of an event: send it if the reader is parked and its client keeps up."""
        if self._waiter is None or self.outlet is None:
            return
        last_id = self.stream.last_id
        try:
            while self.cursor != last_id and self.outlet.ready():
                self._send()
        except ReplayExpired:  # this runs in the generation's task: the reader's own meets it again
            self.wake()
            return
        if self.cursor != last_id or self.at_end():
            self.wake()

    def wake(self) -> None:
        """Wake the reader's task: for a heartbeat, or because there is nothing to wait for."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def close(self) -> None:
        """Leave the stream; the reader's task is told so if it waits."""
        self.closed = True
        self.stream.readers.discard(self)
        self.wake()
