"""TokenStream and its readers: states, positions, parking, lagging, leaving."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.core import ChatRequest, Counts, Delta, ToolCall
from app.errors import Cancelled, EngineFailed, ReplayExpired, ReplayPositionUnknown
from app.stream.reader import Reader
from app.stream.ring import Ring
from app.stream.token_stream import Outbox, TokenStream, usage_of

PING = b"ping"


def delta(text: str, **fields) -> Delta:
    """A text delta of choice 0."""
    return Delta(0, "text", text, (1,), Counts(), **fields)


class PlainWire:
    """Frames a test can read: `id:text`, or the event's name."""

    def text(self, event_id, track, text):  # noqa: ARG002  # the signature of Wire
        """One event."""
        return b"%d:%b" % (event_id, text)

    def delta(self, last_id, parts):
        """Several events."""
        return b"%d:%b" % (last_id, b"|".join(part.text for part in parts))

    def control(self, event_id, event):
        """No text."""
        return b"%d:%b" % (event_id, type(event).__name__.encode())


class Client:
    """An sink whose client reads when told."""

    def __init__(self) -> None:
        self.frames: list[bytes] = []
        self.reading = asyncio.Event()
        self.reading.set()
        self.aborted = False

    def ready(self):
        """Whether the client reads."""
        return self.reading.is_set()

    def write(self, *frames):
        """Take frames."""
        self.frames.extend(frames)

    async def caught_up(self):
        """Wait until the client reads."""
        await self.reading.wait()

    def abort(self):
        """Note it."""
        self.aborted = True


class GoneClient(Client):
    """One whose connection fails once the stream is open."""

    def write(self, *frames):
        """Fail."""
        if self.frames:
            raise OSError("gone")
        super().write(*frames)


def make_stream(limit_bytes: int = 10**9) -> TokenStream:
    """A pending stream."""
    request = ChatRequest("chatcmpl-1", "local", "scripted", {}, 0)
    return TokenStream(request, PlainWire(), Ring(limit_bytes))


async def turns(count: int = 5) -> None:
    """Let other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)


def follow(reader: Reader, client: Client) -> asyncio.Task[None]:
    """The reader's task."""
    return asyncio.create_task(reader.follow(client, PING))


async def test_states_in_order():
    """A stream is pending, then open, then done; readers that wait for each are told."""
    stream = make_stream()
    opened = asyncio.create_task(stream.status_sent())
    ended = asyncio.create_task(stream.ended())
    await turns()
    assert (stream.status_unsent, stream.done, opened.done(), ended.done()) == (True, False, False, False)
    stream.open(1)
    await turns()
    assert (stream.status_unsent, stream.done, opened.done(), ended.done()) == (False, False, True, False)
    stream.close()
    await turns()
    assert (stream.done, stream.refused, ended.done()) == (True, False, True)
    assert stream.finished_at_s is not None


async def test_refusal_reaches_everyone_and_sends_nothing():
    """An error before the stream opened is raised to all who wait; no event was ever made."""
    stream = make_stream()
    waiting = [asyncio.create_task(stream.status_sent()) for _ in range(2)]
    await turns()
    stream.fail(EngineFailed("no"))
    for task in waiting:
        with pytest.raises(EngineFailed):
            await task
    assert (stream.done, stream.refused, stream.last_id) == (True, True, 0)


async def test_waiter_that_gives_up_leaves_the_others():
    """Cancelling one who waits for the end does not end the wait of another."""
    stream = make_stream()
    first, second = (asyncio.create_task(stream.ended()) for _ in range(2))
    await turns()
    first.cancel()
    await turns()
    stream.open(1)
    stream.close()
    await second


async def test_error_after_opening_is_an_event():
    """An error after the first event is an event, and the end follows it."""
    stream = make_stream()
    stream.open(1)
    client = Client()
    following = follow(stream.attach(), client)
    stream.fail(EngineFailed("broke"))
    await following
    assert client.frames == [b"1:Opened", b"2:Failed", b"3:Done"]


async def test_cancelled_while_pending_is_never_opened():
    """A stream cancelled while it waits refuses to open."""
    stream = make_stream()
    stream.cancel("disconnect")
    with pytest.raises(Cancelled):
        stream.open(1)


async def test_cancel_aborts_once_and_early_cancels_too():
    """`cancel` calls the engine's abort once, and at once if it was there first."""
    calls = []
    stream = make_stream()
    stream.open(1)
    stream.on_cancel(lambda: calls.append("first"))
    stream.cancel("one")
    stream.cancel("two")
    assert (calls, stream.cancelled) == (["first"], "one")
    early = make_stream()
    early.open(1)
    early.cancel("early")
    early.on_cancel(lambda: calls.append("early"))
    assert calls == ["first", "early"]
    early.close()
    early.cancel("late")
    assert early.cancelled == "early"


async def test_positions():
    """A reader attaches anywhere from the start to the newest event, and nowhere else."""
    stream = make_stream()
    stream.open(1)
    stream.append(delta("a"))
    for after in (0, 1, 2):
        stream.attach(after).close()
    with pytest.raises(ReplayPositionUnknown):
        stream.attach(3)
    assert not stream.readers


async def test_positions_of_a_trimmed_stream():
    """Events that left the ring cannot be attached to, nor be told as the whole answer."""
    stream = make_stream(4096)
    stream.open(1)
    for number in range(2000):
        stream.append(delta(f"{number} "))
    with pytest.raises(ReplayExpired) as error:
        stream.attach()
    earliest = int(error.value.message.rstrip(".").rpartition(" ")[2])
    stream.attach(earliest)
    with pytest.raises(ReplayExpired):
        stream.attach(earliest - 1)
    with pytest.raises(ReplayExpired):
        stream.whole()


async def test_a_token_a_turn_is_a_frame_and_several_are_one():
    """What is written in one turn of the loop is sent in the next: one frame, whatever was waiting."""
    stream = make_stream()
    stream.open(1)
    client = Client()
    following = follow(stream.attach(), client)
    await turns()
    for piece in "ab":
        stream.append(delta(piece))
        await asyncio.sleep(0)
    assert client.frames == [b"1:Opened", b"2:a", b"3:b"]
    for piece in "cde":
        stream.append(delta(piece))
    assert len(client.frames) == 3
    await asyncio.sleep(0)
    assert client.frames[3:] == [b"6:cde"]
    stream.close()
    await following
    assert client.frames[-1] == b"7:Done"


async def test_a_token_of_each_choice_is_a_frame_each_in_one_write():
    """Many clients read the first choice of a chunk alone. Only where a choice has several are all joined."""
    stream = make_stream()
    stream.open(2)
    client = Client()
    following = follow(stream.attach(), client)
    await turns()
    for choice in range(2):
        stream.append(Delta(choice, "text", "a", (1,), Counts()))
    await asyncio.sleep(0)
    assert client.frames == [b"1:Opened", b"2:a", b"3:a"]
    for choice in (0, 1, 0, 1):
        stream.append(Delta(choice, "text", "b", (1,), Counts()))
    await asyncio.sleep(0)
    assert client.frames[3:] == [b"7:bb|bb"]
    stream.close()
    await following


async def test_streams_that_share_an_outbox_are_sent_in_one_turn_with_one_write_each(monkeypatch):
    """Five batches of an engine for a late loop: a write for each stream, and one wake-up for all."""
    outbox, streams, clients, reading = Outbox(), [], [], []
    for _ in range(64):
        stream, client = make_stream(), Client()
        stream.share_outbox(outbox)
        stream.open(1)
        reading.append(follow(stream.attach(), client))
        streams.append(stream)
        clients.append(client)
    await turns()
    loop, calls = asyncio.get_running_loop(), []
    call_soon = loop.call_soon

    def counted(*args: Any, **options: Any) -> asyncio.Handle:
        calls.append(args)
        return call_soon(*args, **options)

    monkeypatch.setattr(loop, "call_soon", counted)
    for piece in "abcde":
        for stream in streams:
            stream.append(delta(piece))
    assert len(calls) == 1
    await asyncio.sleep(0)
    assert all(client.frames[1:] == [b"6:abcde"] for client in clients)
    monkeypatch.undo()
    for stream in streams:
        stream.close()
    await asyncio.gather(*reading)


async def test_a_reader_that_cannot_send_stops_no_other_stream():
    """The error is raised in its own task, and the other streams of the turn are sent."""
    outbox = Outbox()
    broken, whole = make_stream(), make_stream()
    clients = GoneClient(), Client()
    for stream in (broken, whole):
        stream.share_outbox(outbox)
        stream.open(1)
    tasks = [follow(stream.attach(), client) for stream, client in zip((broken, whole), clients, strict=True)]
    await turns()

    for stream in (broken, whole):
        stream.append(delta("a"))
    await turns()
    assert clients[1].frames[-1] == b"2:a"
    with pytest.raises(OSError, match="gone"):
        await tasks[0]
    whole.close()
    await tasks[1]


async def test_lagging_reader_gets_one_frame_and_slows_nobody():
    """While one client does not read, another gets every event; later it gets the rest in one frame."""
    stream = make_stream()
    stream.open(1)
    slow, fast = Client(), Client()
    tasks = [follow(stream.attach(), client) for client in (slow, fast)]
    await turns()
    slow.reading.clear()
    for piece in "abcd":
        stream.append(delta(piece))
        await turns()
    assert fast.frames == [b"1:Opened", b"2:a", b"3:b", b"4:c", b"5:d"]
    slow.reading.set()
    await turns()
    stream.close()
    await asyncio.gather(*tasks)
    assert slow.frames == [b"1:Opened", b"2:a", b"5:bcd", b"6:Done"]


async def test_reader_closed_while_it_lags_ends():
    """A client that leaves while its reader waits for it ends the reader, with all it had or not."""
    for after_last in (True, False):
        stream = make_stream()
        stream.open(1)
        client, reader = Client(), stream.attach()
        following = follow(reader, client)
        await turns()
        client.reading.clear()
        reader.wake()  # a heartbeat's time: it goes to its client, who has stopped reading
        await turns()
        assert reader.stalling or client.frames[-1] == PING
        await turns()
        assert reader.stalling
        if not after_last:
            stream.append(delta("a"))
        reader.close()
        client.reading.set()
        async with asyncio.timeout(10):
            await following


async def test_heartbeat_only_when_there_is_nothing_to_say():
    """A parked reader that is woken sends a heartbeat; one with events sends them instead."""
    stream = make_stream()
    stream.open(1)
    client, reader = Client(), stream.attach()
    following = follow(reader, client)
    await turns()
    reader.wake()
    await turns()
    assert client.frames == [b"1:Opened", PING]
    reader.wake()
    stream.append(delta("a"))
    await turns()
    assert client.frames == [b"1:Opened", PING, b"2:a"]
    stream.close()
    await following
    assert client.frames == [b"1:Opened", PING, b"2:a", b"3:Done"]


async def test_reader_beyond_help_does_not_break_the_generation():
    """A reader that one append takes out of the ring meets the error itself; the writer does not."""
    stream = make_stream(4096)
    stream.open(1)
    following = follow(stream.attach(), Client())
    await turns()
    call = ToolCall(0, "call_1", "weather")
    stream.append(Delta(0, "tool", "x" * 10_000, (1,), Counts(), "tool_calls", tool=call))
    with pytest.raises(ReplayExpired):
        await following


async def test_readers_of_one_event_share_its_bytes():
    """The newest frame is built once, however many readers it goes to."""
    stream = make_stream()
    stream.open(1)
    clients = [Client() for _ in range(3)]
    tasks = [follow(stream.attach(), client) for client in clients]
    await turns()
    stream.append(delta("a"))
    assert len({id(client.frames[-1]) for client in clients}) == 1
    stream.close()
    await asyncio.gather(*tasks)


async def test_reader_attached_after_the_end_reads_it_all():
    """A finished stream is read like a live one, and ends."""
    stream = make_stream()
    stream.open(1)
    stream.append(delta("a"))
    stream.append(delta("b", finish_reason="stop"))
    stream.close()
    client = Client()
    async with asyncio.timeout(10):
        await stream.attach().follow(client, PING)
        assert client.frames == [b"1:Opened", b"3:ab", b"4:Finished", b"5:Done"]
        late = Client()
        await stream.attach(5).follow(late, PING)
    assert not late.frames


async def test_silence_is_measured_from_the_last_frame():
    """Time without a frame counts from when the clock first saw the last one."""
    stream = make_stream()
    stream.open(1)
    reader = stream.attach()
    start_s = asyncio.get_running_loop().time()
    assert reader.silent_s(start_s + 100) == pytest.approx(100, abs=1)
    following = follow(reader, Client())
    await turns()
    assert reader.silent_s(start_s + 200) == 0
    assert reader.silent_s(start_s + 210) == 10
    reader.close()
    await following


def test_usage_counts_the_prompt_once():
    """Usage over several choices has their answers summed and their one prompt once."""
    usage = usage_of({0: Counts(10, 3, 4, 1), 1: Counts(10, 5, 4, 2)})
    assert usage == {
        "prompt_tokens": 10,
        "completion_tokens": 8,
        "total_tokens": 18,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 3},
    }


def test_usage_before_the_first_choice_has_begun_has_the_prompt():
    """Of several choices any may begin first; a checkpoint taken then bills the prompt."""
    usage = usage_of({1: Counts(prompt_tokens=7, completion_tokens=2, cached_tokens=3)})
    assert (usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]) == (7, 3)
