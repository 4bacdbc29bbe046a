"""A reader: parked it is sent each event at once, lagging it is waited for, and it never misses a frame."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from app.errors import ReplayExpired
from app.stream.reader import MAX_WRITE_BYTES, Reader
from app.stream.ring import Ring

HEARTBEAT = b": heartbeat\n\n"


class HandStream:
    """A stream of frames that a test appends; up to `expired` they have left memory."""

    def __init__(self) -> None:
        self.readers: set[Reader] = set()
        self.frames: list[bytes] = []
        self.done = False
        self.expired = 0

    @property
    def last_id(self) -> int:
        """See app.stream.reader."""
        return len(self.frames)

    def frame_after(self, cursor: int) -> tuple[int, bytes]:
        """See app.stream.reader."""
        if cursor < self.expired:
            raise ReplayExpired("gone")
        return cursor + 1, self.frames[cursor]

    def append(self, frame: bytes) -> None:
        """Release an event."""
        self.frames.append(frame)
        self._wake()

    def end(self) -> None:
        """Nothing follows."""
        self.done = True
        self._wake()

    def attach(self, cursor: int = 0) -> Reader:
        """A reader that has seen the events up to there."""
        reader = Reader(
            cast("Ring", self),
            cursor,
            0.0,
            frame_after=self.frame_after,
            ended=lambda: self.done,
            on_close=self.readers.discard,
        )
        self.readers.add(reader)
        return reader

    def _wake(self) -> None:
        for reader in list(self.readers):
            reader.on_event()


class HandSink:
    """A client that keeps up as long as the test says so."""

    def __init__(self) -> None:
        self.keeps_up = True
        self.writes: list[bytes] = []
        self._caught_up = asyncio.Event()

    def ready(self) -> bool:
        """See FrameSink."""
        return self.keeps_up

    def write(self, *frames: bytes) -> None:
        """See FrameSink."""
        self.writes.append(b"".join(frames))

    async def caught_up(self) -> None:
        """See FrameSink."""
        await self._caught_up.wait()

    def abort(self) -> None:
        """See FrameSink."""
        self.catch_up()

    def catch_up(self) -> None:
        """The client has read all."""
        self.keeps_up = True
        self._caught_up.set()


class Following:
    """A stream, a client, and the reader between them."""

    def __init__(self, cursor: int = 0, frames: int = 0) -> None:
        self.stream = HandStream()
        self.stream.frames = [b"%d " % number for number in range(1, frames + 1)]
        self.sink = HandSink()
        self.reader = self.stream.attach(cursor)
        self.following: asyncio.Task[Any] = asyncio.create_task(self.reader.follow(self.sink, HEARTBEAT))

    async def parked(self) -> None:
        """Wait until the reader has nothing to do."""
        while self.reader._waiter is None:
            await asyncio.sleep(0)

    async def end(self) -> bytes:
        """End the stream; all that the client was sent."""
        self.stream.end()
        await self.following
        return b"".join(self.sink.writes)


async def test_event_goes_to_a_parked_reader_in_the_task_that_made_it():
    """Not a task switch later."""
    followed = Following()
    await followed.parked()
    followed.stream.append(b"a")
    assert followed.sink.writes == [b"a"]
    followed.stream.append(b"b")
    assert followed.sink.writes == [b"a", b"b"]
    assert await followed.end() == b"ab"


async def test_reader_is_sent_what_it_has_not_seen_and_nothing_twice():
    """From its position on."""
    followed = Following(cursor=1, frames=3)
    await followed.parked()
    assert await followed.end() == b"2 3 "


async def test_what_has_gathered_is_sent_in_one_write():
    """A client that was behind costs one system call."""
    followed = Following(frames=5)
    await followed.parked()
    assert followed.sink.writes == [b"1 2 3 4 5 "]
    await followed.end()


async def test_one_write_has_so_many_bytes_at_most():
    """The rest follows when the client has had these."""
    followed = Following()
    size = MAX_WRITE_BYTES // 2
    followed.stream.frames = [bytes([65 + number]) * size for number in range(5)]
    await followed.parked()
    assert [len(write) // size for write in followed.sink.writes] == [2, 2, 1]
    await followed.end()


async def test_client_that_lags_is_waited_for_and_misses_nothing():
    """Meanwhile it stalls, which the registry looks at."""
    followed = Following()
    await followed.parked()
    followed.sink.keeps_up = False
    for frame in (b"a", b"b"):
        followed.stream.append(frame)
    assert followed.sink.writes == []
    while not followed.reader.stalling:
        await asyncio.sleep(0)
    followed.sink.catch_up()
    await followed.parked()
    assert not followed.reader.stalling
    assert followed.sink.writes == [b"ab"]
    await followed.end()


async def test_woken_without_news_it_sends_a_heartbeat():
    """The connection shows that it lives."""
    followed = Following()
    await followed.parked()
    followed.reader.wake()
    await asyncio.sleep(0)
    await followed.parked()
    assert await followed.end() == HEARTBEAT


async def test_end_without_news_is_no_heartbeat():
    """Nothing follows the last event."""
    followed = Following(frames=1)
    await followed.parked()
    assert await followed.end() == b"1 "


async def test_closed_reader_leaves_the_stream():
    """It is sent nothing more, and its task ends."""
    followed = Following()
    await followed.parked()
    followed.reader.close()
    followed.stream.append(b"a")
    await followed.following
    assert (followed.sink.writes, followed.stream.readers) == ([], set())
    assert followed.reader.at_end()


async def test_client_that_leaves_while_it_is_waited_for_is_sent_nothing():
    """It had lagged."""
    followed = Following(frames=2)
    followed.sink.keeps_up = False
    while not followed.reader.stalling:
        await asyncio.sleep(0)
    followed.reader.close()
    followed.sink.catch_up()
    await followed.following
    assert followed.sink.writes == []


async def test_reader_whose_events_have_left_memory_is_told_so_in_its_own_task():
    """The generation, in whose task it is found out, goes on."""
    followed = Following()
    await followed.parked()
    followed.stream.expired = 5
    followed.stream.append(b"a")
    with pytest.raises(ReplayExpired):
        await followed.following


async def test_reader_that_is_not_parked_is_not_written_to():
    """Its own task does that when it comes to it."""
    stream = HandStream()
    stream.attach()
    stream.append(b"a")
    followed = Following(frames=1)
    followed.stream.append(b"2 ")
    assert followed.sink.writes == []
    await followed.parked()
    assert await followed.end() == b"1 2 "


async def test_silence_is_counted_from_the_last_frame():
    """To within the time since it was last asked for."""
    followed = Following()
    await followed.parked()
    assert followed.reader.silent_s(5.0) == 5.0
    followed.stream.append(b"a")
    assert followed.reader.silent_s(7.0) == 0.0
    assert followed.reader.silent_s(9.5) == 2.5
    await followed.end()


async def test_reader_of_a_stream_that_has_ended_ends_with_its_last_event():
    """It does not wait."""
    followed = Following(frames=2)
    followed.stream.done = True
    await asyncio.wait_for(followed.following, 5)
    assert followed.sink.writes == [b"1 2 "]
