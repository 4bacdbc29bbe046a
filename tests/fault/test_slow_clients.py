"""Clients that read slowly, or never: bounded memory, and nobody else is slowed."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest

from app.engine.scripted.engine import Script, scripted_text
from tests.support.screens import speaking
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import open_stream, until

SMALL = 4096
"""Kernel buffers, in bytes: what the client does not read is felt at once."""

LONG = Script(tokens=8_000)
"""About 1.6 MB on the wire when every token has a frame of its own."""

PIECES = scripted_text(0, 0, 8_000)
TEXT = "".join(PIECES)


def buffered_bytes(served) -> int:
    """Bytes held in user space for clients that do not read."""
    return sum(p.transport.get_write_buffer_size() for p in served.connections)


def drop_stalled(served: Served) -> None:
    """Have the time over that clients may stall: until now it is longer than any machine takes."""
    streams = served.runtime.streams
    streams._settings = dataclasses.replace(streams._settings, stall_timeout_s=0.1)


async def test_stalled_client_is_dropped_and_slows_nobody(serve: Serve):
    """A client that never reads holds bounded memory and is cut; generation and other readers go on."""
    served = await serve(LONG, send_buffer_bytes=SMALL, stall_timeout_s=60)
    async with await served.open(chat(), receive_buffer_bytes=SMALL) as stalled:
        async with await served.open(stream_id=stalled.id) as other:
            transcript = await other.to_end()
        assert transcript.content() == TEXT
        stream = served.stream(stalled.id)
        assert stream.done
        assert len(stream.readers) == 1, "the client must still stall for this test to say anything"
        assert buffered_bytes(served) < 512 * 1024
        drop_stalled(served)
        await until(lambda: not stream.readers)
        assert len(served.logged("reader_stalled")) == 1
        await until(lambda: not served.connections)


async def test_stalled_client_that_left_frees_the_generation(serve: Serve):
    """A stalled client that disconnects has left: grace runs and the engine is freed."""
    served = await serve(Script(tokens=10**6, rate=2000), send_buffer_bytes=SMALL, resume_grace_s=0.1)
    stalled = await served.open(chat(), receive_buffer_bytes=SMALL)
    (reader,) = served.stream(stalled.id).readers
    await until(lambda: reader.stalling)
    stalled.connection.reset()
    await until(lambda: served.running == 0, timeout_s=5)


async def test_client_that_stalls_at_the_end_is_dropped(serve: Serve):
    """An answer that waits, complete, for a client that never reads is not kept for ever."""
    served = await serve(Script(tokens=200), send_buffer_bytes=SMALL, stall_timeout_s=1)
    async with await served.open(chat(), receive_buffer_bytes=SMALL) as stalled:
        await until(lambda: not served.stream(stalled.id).readers)
        assert buffered_bytes(served) > 0, "the answer must not fit the kernel's buffers"
        await until(lambda: not served.connections, timeout_s=15)


async def test_stalled_reader_of_a_forgotten_stream_is_dropped(serve: Serve):
    """Retention may end while a client stalls; it is dropped all the same."""
    served = await serve(LONG, send_buffer_bytes=SMALL, stall_timeout_s=60, retention_s=0)
    async with await served.open(chat(), receive_buffer_bytes=SMALL) as stalled:
        stream = served.stream(stalled.id)
        await stream.ended()
        await until(lambda: not served.runtime.streams._streams)
        assert stream.readers
        drop_stalled(served)
        await until(lambda: not stream.readers)


async def test_slow_client_gets_coalesced_frames_and_no_gap(serve: Serve):
    """A client that reads slowly gets fewer, larger frames with all of the text."""
    served = await serve(LONG, send_buffer_bytes=SMALL, stall_timeout_s=30)
    async with await served.open(chat(), receive_buffer_bytes=SMALL) as slow:
        await served.stream(slow.id).ended()
        transcript = await slow.to_end()
    assert transcript.content() == TEXT
    assert transcript.done
    assert transcript.last_id > 8_000
    assert transcript.num_events < 2_000


async def test_slow_but_reading_client_is_not_dropped(serve: Serve):
    """A client that reads little by little, for longer than the stall timeout, keeps its stream."""
    answer = " ".join(["w" * 50_000] * 100)
    served = await serve(
        send_buffer_bytes=SMALL, engine_type=speaking(answer), stream_bytes=10**7, stall_timeout_s=60
    )
    streams, now_s, looks = served.runtime.streams, asyncio.get_running_loop().time(), 0
    await streams.aclose()  # its ticker: here 50 s pass between any two writes
    async with await served.open(chat(), receive_buffer_bytes=SMALL) as slow:
        stream = served.stream(slow.id)
        [protocol], [reader], cursor = served.connections, stream.readers, 0
        while not slow.transcript.done:
            for event in slow.parser.feed(await anext(slow._pieces)):
                slow.transcript.add(event)
            if reader.cursor > cursor and reader.stalling:
                cursor, now_s, looks = reader.cursor, now_s + 50, looks + 1
                streams._look_after(stream, now_s)
        assert slow.transcript.content() == answer
        assert looks > 5, "the client must lag for this test to say anything"
        assert protocol._stall_timer is None
    assert not served.logged("reader_stalled")


@pytest.mark.parametrize("readers", [1, 5])
async def test_lagging_reader_is_told_what_it_lost(serve: Serve, readers: int):
    """A client that lags beyond the ring gets an error event, not a gap."""
    # All join before the first token.
    script = dataclasses.replace(LONG, prefill_s=60)
    served = await serve(script, send_buffer_bytes=SMALL, stream_bytes=8192)
    first = await served.open(chat(), receive_buffer_bytes=SMALL)
    joined = [
        await open_stream(served.port, stream_id=first.id, receive_buffer_bytes=SMALL)
        for _ in range(readers - 1)
    ]
    [run] = served.engine._runs.values()
    run.wake()
    await served.stream(first.id).ended()
    assert served.stream(first.id).nbytes <= 8192
    for stream in (first, *joined):
        async with stream:
            transcript = await stream.to_end()
        assert [e["code"] for e in transcript.errors] == ["events_expired"]
        assert transcript.done
        assert TEXT.startswith(transcript.content())
        assert transcript.content()
    assert not served.logged("request")[0]["error"]


async def test_events_that_left_the_ring_are_gone(serve: Serve):
    """Attaching to events over the stream's memory limit is 410, naming the earliest position."""
    served = await serve(Script(tokens=3000), stream_bytes=8192)
    async with await served.open(chat()) as stream:
        await served.stream(stream.id).ended()
    answer = await served.call("GET", f"/api/chat/completions/{stream.id}")
    assert answer.refusal() == (410, "events_expired", "Last-Event-ID")
    earliest = int(answer.error()["message"].rstrip(".").rpartition(" ")[2])
    refused = await served.call("GET", f"/api/chat/completions/{stream.id}", last_event_id=str(earliest - 1))
    assert refused.status == 410
    async with await served.open(stream_id=stream.id, after=earliest) as late:
        transcript = await late.to_end()
    # Event 1 opens the stream, so that event N holds piece N - 2.
    assert transcript.content() == "".join(PIECES[earliest - 1 : 3000])
    assert transcript.done


async def test_json_of_a_trimmed_stream_is_gone_too(serve: Serve):
    """An answer whose beginning has left memory is 410, never a part of it passed off as the whole."""
    served = await serve(Script(tokens=3000), stream_bytes=8192)
    async with await served.open(chat()) as stream:
        await served.stream(stream.id).ended()
    answer = await served.call("GET", f"/v1/chat/completions/{stream.id}")
    assert answer.refusal()[:2] == (410, "events_expired")
