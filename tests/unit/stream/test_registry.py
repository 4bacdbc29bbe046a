"""The registry of streams: keys, grace, heartbeats, stalls, retention, draining."""

from __future__ import annotations

import asyncio

import pytest
import structlog

from app.core import ChatRequest, Counts, Delta, IdempotencyKey
from app.errors import Conflict, Draining, EngineFailed, EngineOverloaded, Unavailable
from app.settings import Settings
from app.stream.registry import StreamRegistry
from app.stream.ring import Opened, Ring
from app.stream.token_stream import SUSPENDED, TokenStream


class NoWire:
    """Frames of no content."""

    def text(self, event_id, track, text):  # noqa: ARG002  # the signature of Wire
        """One event."""
        return b""

    def delta(self, last_id, parts):  # noqa: ARG002  # same
        """Several events."""
        return b""

    def control(self, event_id, event):  # noqa: ARG002  # same
        """No text."""
        return b""


class Sink:
    """A connection that never takes anything."""

    def __init__(self) -> None:
        self.aborted = asyncio.Event()

    def ready(self):
        """Never."""
        return False

    def write(self, *frames):
        """Fail: it is not ready."""
        raise AssertionError(frames)

    async def caught_up(self):
        """Wait for the cut."""
        await self.aborted.wait()

    def abort(self):
        """Cut."""
        self.aborted.set()


class Registry:
    """A registry and generations that the test ends by hand."""

    def __init__(self, **settings) -> None:
        self.log = structlog.testing.LogCapture()
        self.streams = StreamRegistry(
            Settings(**settings), structlog.wrap_logger(None, processors=[self.log])
        )
        self.finish: dict[str, asyncio.Event] = {}
        self._number = 0

    def create(self, key: IdempotencyKey | None = None, owner: str = "local", size: int = 0) -> TokenStream:
        """A live, open stream holding `size` bytes of text."""
        self._number += 1
        request = ChatRequest(f"chatcmpl-{self._number}", owner, "scripted", {}, 0, idempotency=key)
        stream = self.streams.create(request, NoWire())
        finish = self.finish[stream.request_id] = asyncio.Event()

        async def generation() -> None:
            stream.open(1)
            stream.on_cancel(finish.set)
            stream.append(Delta(0, "text", "x" * size, (1,), Counts()))
            await finish.wait()
            stream.close()

        self.streams.run(stream, generation())
        return stream

    async def end(self, stream: TokenStream) -> None:
        """Let the generation finish."""
        self.finish[stream.request_id].set()
        await stream.ended()
        await turns()

    def refuse(self, stream_error, key: IdempotencyKey | None = None) -> TokenStream:
        """A stream refused before it opened."""
        self._number += 1
        request = ChatRequest(f"chatcmpl-{self._number}", "local", "scripted", {}, 0, idempotency=key)
        stream = self.streams.create(request, NoWire())

        async def generation() -> None:
            stream.fail(stream_error)

        self.streams.run(stream, generation())
        return stream


async def turns() -> None:
    """Let other tasks run."""
    for _ in range(5):
        await asyncio.sleep(0)


def key(name: str, body: bytes = b"body") -> IdempotencyKey:
    """A key and its body."""
    return IdempotencyKey(name, body)


async def test_one_generation_per_key_and_owner():
    """A key finds its stream for its owner and body only."""
    registry = Registry()
    stream = registry.create(key("k"))
    assert registry.streams.find_by_key("local", key("k")) is stream
    assert registry.streams.find_by_key("other", key("k")) is None
    assert registry.streams.find_by_key("local", key("l")) is None
    with pytest.raises(Conflict) as conflict:
        registry.streams.find_by_key("local", key("k", b"other body"))
    assert conflict.value.code == "idempotency_key_reused"
    await registry.end(stream)
    assert registry.streams.find_by_key("local", key("k")) is stream


async def test_refused_stream_leaves_nothing():
    """A refused request cannot be found, and its key is free."""
    registry = Registry()
    stream = registry.refuse(EngineFailed("no"), key("k"))
    await turns()
    assert registry.streams.find_by_key("local", key("k")) is None
    assert registry.streams.num_live == 0
    assert registry.streams.find(stream.request_id, "local") is None


async def test_answer_for_lack_of_room_frees_its_key_but_stays():
    """A stream that ended in a 503 can be read again, and its key used again."""
    registry = Registry()
    request = ChatRequest("chatcmpl-x", "local", "scripted", {}, 0, idempotency=key("k"))
    stream = registry.streams.create(request, NoWire())

    async def generation() -> None:
        stream.open(1)
        stream.fail(EngineOverloaded("full"))

    registry.streams.run(stream, generation())
    await stream.ended()
    await turns()
    assert registry.streams.find_by_key("local", key("k")) is None
    assert registry.streams.find("chatcmpl-x", "local") is stream


async def test_foreign_stream_does_not_exist():
    """Another owner's stream is not found, like one that never was."""
    registry = Registry()
    stream = registry.create(owner="someone")
    for request_id in (stream.request_id, "chatcmpl-never"):
        assert registry.streams.find(request_id, "local") is None
    await registry.end(stream)


async def test_limit_of_live_streams():
    """Over the limit a stream is refused and leaves no key; a finished one makes room."""
    registry = Registry(max_live_streams=1)
    first = registry.create()
    with pytest.raises(Unavailable) as refused:
        registry.create(key("k"))
    assert (refused.value.code, refused.value.retry_after_s) == ("too_many_streams", 2)
    assert registry.streams.find_by_key("local", key("k")) is None
    await registry.end(first)
    await registry.end(registry.create(key("k")))


async def test_grace_of_the_last_reader():
    """The last reader to leave starts the grace period; one that comes back in time ends it."""
    registry = Registry(resume_grace_s=0.05)
    stream = registry.create()
    await stream.status_sent()
    first, second = stream.attach(), stream.attach()
    registry.streams.leave(stream, first)
    assert not registry.streams._grace
    registry.streams.leave(stream, second)
    again = stream.attach()
    await asyncio.sleep(0.1)  # longer than the grace period
    assert stream.cancelled is None
    registry.streams.leave(stream, again)
    async with asyncio.timeout(10):
        await stream.ended()
    assert stream.cancelled == "disconnect"
    assert not registry.streams._grace


async def test_for_room_the_longest_unread_ends_first():
    """Not one that somebody has come back to, though its grace period is not over."""
    registry = Registry(resume_grace_s=30)
    streams = [registry.create() for _ in range(3)]
    for stream in streams:
        await stream.status_sent()
        registry.streams.leave(stream, stream.attach())
    streams[0].attach()
    told = [registry.streams.abort_unread("scripted") for _ in range(3)]
    assert told == [streams[1].request_id, streams[2].request_id, None]
    assert [stream.cancelled for stream in streams] == [None, "disconnect", "disconnect"]
    await registry.end(streams[0])


async def test_what_has_just_ended_is_not_stopped_for_room():
    """Its task may have yet to end: it makes no room, and to be named again and again would be for ever."""
    registry = Registry(resume_grace_s=30)
    stream = registry.create()
    await stream.status_sent()
    registry.streams.leave(stream, stream.attach())
    stream.close()
    assert stream.request_id in registry.streams._grace
    assert registry.streams.abort_unread("scripted") is None


async def test_leaving_again_starts_the_grace_period_again():
    """Each absence has the whole grace period."""
    registry = Registry(resume_grace_s=30)
    stream = registry.create()
    await stream.status_sent()
    registry.streams.leave(stream, stream.attach())
    first = registry.streams._grace[stream.request_id]
    registry.streams.leave(stream, stream.attach())
    assert first.cancelled()
    assert not registry.streams._grace[stream.request_id].cancelled()
    await registry.end(stream)
    assert not registry.streams._grace


@pytest.mark.parametrize(("abandon_s", "resume_s"), [(3, 30), (30, 5)])
async def test_the_grace_is_short_without_a_sign_of_return(abandon_s: float, resume_s: float):
    """And never longer than with one; who has come back once has the long one from then on."""
    registry = Registry(abandon_grace_s=abandon_s, resume_grace_s=resume_s)
    stream = registry.create()
    await stream.status_sent()
    assert registry.streams.grace_left_s(stream.request_id) is None
    registry.streams.leave(stream, stream.attach())
    short_s = min(abandon_s, resume_s)
    assert registry.streams.grace_left_s(stream.request_id) == pytest.approx(short_s, abs=0.5)
    again = stream.attach()
    assert registry.streams.grace_left_s(stream.request_id) is None
    stream.expect_return()
    registry.streams.leave(stream, again)
    assert registry.streams.grace_left_s(stream.request_id) == pytest.approx(resume_s, abs=0.5)
    stream.cancel("cancelled")
    assert registry.streams.grace_left_s(stream.request_id) == 0
    await registry.end(stream)


async def test_leaving_a_finished_stream_starts_nothing():
    """Nobody waits for the reader of a stream that is over."""
    registry = Registry()
    stream = registry.create()
    await stream.status_sent()
    reader = stream.attach()
    await registry.end(stream)
    registry.streams.leave(stream, reader)
    assert not registry.streams._grace


async def test_retention_by_time():
    """A finished stream is held for its retention, then found no more; a live one stays."""
    registry = Registry(retention_s=300)
    live, finished = registry.create(key("l")), registry.create(key("f"))
    await registry.end(finished)
    now_s = finished.finished_at_s
    registry.streams._forget_old(now_s + 299)
    assert registry.streams.find(finished.request_id, "local") is finished
    registry.streams._forget_old(now_s + 301)
    assert registry.streams.find(finished.request_id, "local") is None
    assert registry.streams.find_by_key("local", key("f")) is None
    assert registry.streams.find(live.request_id, "local") is live
    await registry.end(live)


async def test_retention_by_bytes():
    """Over the memory limit the oldest finished streams go first, and no more than must."""
    registry = Registry(retained_bytes=30_000)
    streams = [registry.create(size=10_000) for _ in range(4)]
    for stream in streams:
        await registry.end(stream)
    registry.streams._forget_old(streams[-1].finished_at_s)
    assert list(registry.streams._streams.values()) == streams[2:]


async def test_retained_stream_holds_no_prompt():
    """Once a stream has ended, its request's body is gone."""
    registry = Registry()
    stream = registry.create(size=10)
    await registry.end(stream)
    assert not stream.request.body


async def test_live_streams_have_a_memory_limit_together():
    """While running streams hold more than the limit, new requests are refused with 503."""
    registry = Registry(retained_bytes=25_000)
    registry.create(size=40_000)
    await turns()
    await registry.streams._look_after_readers(0.0)
    with pytest.raises(Unavailable) as refusal:
        registry.create(size=1)
    assert refusal.value.code == "too_many_streams"


async def test_deleted_live_stream_is_not_retained():
    """A stream deleted while it runs is cancelled, and not kept when it ends."""
    registry = Registry()
    stream = registry.create(key("k"))
    await stream.status_sent()
    registry.streams.delete(stream)
    await stream.ended()
    await turns()
    assert stream.cancelled == "deleted"
    assert not registry.streams._finished
    assert not registry.streams._streams
    assert not registry.streams._keys


@pytest.mark.parametrize("forgotten", [False, True])
async def test_stalled_reader_is_cut_after_its_time(forgotten: bool):
    """A reader that waits for its client is cut after the stall timeout, also when its stream has gone."""
    registry = Registry(stall_timeout_s=60)
    stream = registry.create()
    await stream.status_sent()
    sink, reader = Sink(), stream.attach()
    following = asyncio.create_task(reader.follow(sink, b""))
    await turns()
    if forgotten:
        await registry.end(stream)
        registry.streams.delete(stream)
    now_s = asyncio.get_running_loop().time()
    await registry.streams._look_after_readers(now_s)
    await registry.streams._look_after_readers(now_s + 59)
    assert not sink.aborted.is_set()
    await registry.streams._look_after_readers(now_s + 61)
    assert sink.aborted.is_set()
    reader.close()
    await following
    await registry.streams._look_after_readers(now_s + 62)
    assert not registry.streams._forgotten
    await registry.end(stream)


async def test_drain_waits_then_ends():
    """Draining refuses new streams, lets live ones finish in time, and ends the rest."""
    registry = Registry()
    quick, endless = registry.create(), registry.create()
    await endless.status_sent()
    draining = asyncio.create_task(registry.streams.drain(0.2))
    await turns()
    with pytest.raises(Draining):
        registry.create()
    registry.finish[quick.request_id].set()
    await draining
    assert (quick.cancelled, endless.cancelled) == (None, "shutdown")
    assert quick.done
    assert endless.done
    assert registry.streams.num_live == 0


async def test_drain_of_nothing_is_immediate():
    """With no live streams draining takes no time."""
    async with asyncio.timeout(10):
        await Registry().streams.drain(3600)


async def test_broken_generation_is_logged_by_place():
    """An exception out of a generation is logged without its words and frees its place."""
    registry = Registry()
    request = ChatRequest("chatcmpl-x", "local", "scripted", {}, 0, idempotency=key("k"))
    stream = registry.streams.create(request, NoWire())

    async def generation() -> None:
        stream.open(1)
        stream.fail(EngineFailed("broke"))
        raise RuntimeError("words of the prompt")

    registry.streams.run(stream, generation())
    await stream.ended()
    await turns()
    assert registry.streams.num_live == 0
    (entry,) = registry.log.entries
    assert entry["event"] == "generation_broke"
    assert "words" not in repr(entry)


async def test_closing_twice_is_closing_once():
    """`aclose` can be called again."""
    streams = Registry().streams
    streams.start()
    await streams.aclose()
    await streams.aclose()


def continued(owner: str = "local", idempotency: IdempotencyKey | None = None) -> TokenStream:
    """A stream that another process has begun."""
    request = ChatRequest("chatcmpl-1", owner, "scripted", {}, 0, idempotency=idempotency)
    ring = Ring(1 << 20)
    ring.append_control(Opened(1))
    return TokenStream.continued(request, NoWire(), ring, {})


async def test_an_adopted_stream_is_found_and_waits_for_its_reader():
    """By its id and its key; nobody who comes for it in time means that nobody wants it."""
    registry = Registry(resume_grace_s=0)
    stream = continued(idempotency=key("k"))
    registry.streams.add_continued(stream)
    assert registry.streams.find("chatcmpl-1", "local") is stream
    assert registry.streams.find_by_key("local", key("k")) is stream
    assert registry.streams.is_live("chatcmpl-1")
    assert stream.cancelled is None
    assert registry.streams._grace["chatcmpl-1"].when() > asyncio.get_running_loop().time() + 4
    registry.streams._grace_over(stream)
    assert stream.cancelled == "disconnect"


async def test_a_suspended_stream_is_forgotten():
    """The next who asks for it has it go on; one that was suspended here gives way to the new one."""
    registry = Registry()
    stream = continued(idempotency=key("k"))
    registry.streams.add_continued(stream)

    async def generation() -> None:
        stream.suspend(Draining("stopping"))

    registry.streams.run(stream, generation())
    await turns()
    assert registry.streams.find("chatcmpl-1", "local") is None
    assert registry.streams.find_by_key("local", key("k")) is None
    assert not registry.streams.is_live("chatcmpl-1")
    again = continued(idempotency=key("k"))
    registry.streams.add_continued(again)
    later = continued(idempotency=key("k"))
    again.suspend(Draining("stopping"))
    assert registry.streams.find("chatcmpl-1", "local") is None
    assert registry.streams.find_by_key("local", key("k")) is None
    registry.streams.add_continued(later)
    assert registry.streams.find_by_key("local", key("k")) is later


async def test_a_server_that_stops_adopts_nothing():
    """The stream stays suspended."""
    registry = Registry()
    await registry.streams.drain(0)
    with pytest.raises(Draining):
        registry.streams.add_continued(continued())


async def test_what_is_left_of_a_drain_has_its_reason():
    """To be suspended, for example."""
    registry = Registry()
    endless = registry.create()
    await endless.status_sent()
    await registry.streams.drain(0, SUSPENDED)
    assert endless.cancelled == "suspended"


@pytest.mark.parametrize(("resumable", "reason"), [(False, "shutdown"), (True, "suspended")])
async def test_a_drain_suspends_no_answer_that_nobody_can_ask_for(resumable: bool, reason: str):
    """One in one piece, without a sign that its client returns: it would be generated and billed twice."""
    registry = Registry()
    endless = registry.create()
    endless.unseen, endless.resumable = True, resumable
    await endless.status_sent()
    await registry.streams.drain(0, SUSPENDED)
    assert endless.cancelled == reason
