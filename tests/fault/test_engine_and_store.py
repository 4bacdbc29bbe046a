"""Two faults at once: the engine is away, and the store is, or the clock steps, or the server stops."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path

import pytest

from app.core import ModelCard
from app.engine.http.engine import RemoteEngine
from app.engine.http.model import Facts
from app.engine.http.pool import RemoteOptions
from tests.support.broken_stores import (
    check_books,
    checkpoint_often,
    failing,
    fill_disk,
    free_disk,
    outside,
    rows,
)
from tests.support.false_sglang import PROMPT_TOKENS, FalseServer, PlainModel, words
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Stream, Transcript, until

TOKENS = 80
STREAMS = 4
HOUR_S = 3600
WHOLE = words(range(1, TOKENS + 1))


class LargeModel(PlainModel):
    """A model with room for all of them."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.card = ModelCard("scripted", 1000, 100_000, 900, frozenset())


class Away:
    """A server of ours whose engine is elsewhere, and goes away and comes back as a test says."""

    def __init__(self, serve: Serve, server: FalseServer, data_dir: Path) -> None:
        self._serve = serve
        self.server = server
        self._data_dir = data_dir

    async def start(self, **settings: float) -> Served:
        """A process on the data directory, with an engine of its own; the one before has stopped."""
        engine = RemoteEngine(RemoteOptions([self.server.url], poll_s=0.02), LargeModel)
        self.served = await self._serve(
            ready_engine=engine, heartbeat_s=0.05, data_dir=self._data_dir, drain_timeout_s=0.0, **settings
        )
        self.engine = engine
        await checkpoint_often(self.served)
        await until(lambda: engine._pool.is_healthy)
        return self.served

    async def stop(self) -> None:
        """End the process as SIGTERM does: what runs is suspended."""
        await self.served.runtime.drain()
        await self.served.close()

    async def streams(self) -> list[Stream]:
        """Clients that have read the beginnings of their answers."""
        body = chat(max_tokens=TOKENS, stream_options={"include_usage": True})
        streams = [await self.served.open(body) for _ in range(STREAMS)]
        for stream in streams:
            await stream.read_events(6)
        return streams

    async def lose_engine(self) -> None:
        """Break off everything that the engine does; returns once it is known."""
        await self.server.stop()
        await until(lambda: not self.engine._pool.is_healthy)

    async def find_engine(self) -> None:
        """The engine is back."""
        await self.server.start()

    async def read_on(self, streams: list[Stream]) -> list[Transcript]:
        """The rest of what clients get. Nothing more happens to the engine, so it hurries."""
        self.server.pause_s = 0.005
        return await asyncio.gather(*(stream.to_end() for stream in streams))


@pytest.fixture
async def away(serve: Serve, tmp_path: Path) -> AsyncIterator[Away]:
    """A process, whose engine is there. Its answers last for four seconds: a fault meets them all."""
    server = FalseServer()
    server.tokens, server.pause_s = TOKENS, 0.05
    await server.start()
    process = Away(serve, server, tmp_path)
    await process.start()
    yield process
    await server.stop()


def check_whole(transcript: Transcript) -> None:
    """A client has the answer that it would have had."""
    transcript.check_ids()
    assert (transcript.content(), transcript.errors) == (WHOLE, [])
    assert transcript.finish_reasons == {0: "length"}
    assert transcript.usage is not None
    assert (transcript.usage["prompt_tokens"], transcript.usage["completion_tokens"]) == (
        PROMPT_TOKENS,
        TOKENS,
    )


async def check_billed_once(
    served: Served, streams: list[Stream], outcomes: Collection[str] = ("length",)
) -> None:
    """Each request has one settled row, with the counts that its client was told."""
    await check_books(served)
    bills = rows(served.runtime.settings.data_dir)
    assert set(bills) == {stream.id for stream in streams}
    for bill in bills.values():
        assert (bill["state"], bill["completion_tokens"]) == ("settled", TOKENS)
        assert bill["outcome"] in outcomes


async def test_the_engine_is_lost_while_the_disk_is_full(away: Away):
    """Room comes back before the engine does: the streams are whole, and billed once."""
    streams = await away.streams()
    await fill_disk(away.served)
    await failing(away.served)
    await away.lose_engine()
    reading = asyncio.create_task(away.read_on(streams))
    await free_disk(away.served)
    await away.find_engine()
    for transcript in await reading:
        check_whole(transcript)
    await check_billed_once(away.served, streams)


async def test_the_engine_comes_back_to_a_full_disk(away: Away):
    """The streams go on; what could not be settled at their end says so, and is settled later, once."""
    streams = await away.streams()
    await away.lose_engine()
    await fill_disk(away.served)
    await away.find_engine()
    await failing(away.served)
    transcripts = await away.read_on(streams)
    for transcript in transcripts:
        assert transcript.content() == WHOLE
        assert {error["code"] for error in transcript.errors} <= {"storage_unavailable"}
    await free_disk(away.served)
    await check_billed_once(away.served, streams, ("length", "storage_unavailable"))


async def test_a_disk_that_stays_full_ends_streams_whose_engine_is_away(away: Away):
    """Past the journal's patience they end in an error, though there is no engine that could end them."""
    await checkpoint_often(away.served, stream_s=1.0)
    streams = await away.streams()
    await fill_disk(away.served)
    await failing(away.served)
    await away.lose_engine()
    for transcript in await away.read_on(streams):
        assert [error["code"] for error in transcript.errors] == ["storage_unavailable"]
        assert WHOLE.startswith(transcript.content())
    await free_disk(away.served)
    await check_books(away.served)
    for stream in streams:
        tokens = rows(away.served.runtime.settings.data_dir)[stream.id]["completion_tokens"]
        assert words(range(1, tokens + 1)) == stream.transcript.content()
    await away.find_engine()


@pytest.mark.parametrize("unlocked_first", [True, False])
async def test_the_engine_is_lost_while_the_database_is_locked(away: Away, *, unlocked_first: bool):
    """Whichever comes back first, the streams are whole, and billed once."""
    streams = await away.streams()
    with outside(away.served.runtime.settings.data_dir) as other:
        other.execute("BEGIN IMMEDIATE")
        await failing(away.served)
        await away.lose_engine()
        reading = asyncio.create_task(away.read_on(streams))
        if not unlocked_first:
            await away.find_engine()
            num_events = [stream.transcript.num_events for stream in streams]
            await until(
                lambda: all(s.transcript.num_events > n for s, n in zip(streams, num_events, strict=True))
            )
        other.execute("ROLLBACK")
    if unlocked_first:
        await until(lambda: not away.served.runtime.database.failing)
        await away.find_engine()
    for transcript in await reading:
        check_whole(transcript)
    await check_billed_once(away.served, streams)


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets the clock of the day forward by so many seconds, or back."""
    now_ns, now_s, offset_s = time.time_ns, time.time, 0
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + offset_s * 10**9)
    monkeypatch.setattr(time, "time", lambda: now_s() + offset_s)

    def by(seconds: int) -> None:
        nonlocal offset_s
        offset_s += seconds

    return by


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
async def test_the_clock_steps_while_the_engine_is_away(
    away: Away, step: Callable[[int], None], seconds: int
):
    """No stream ends for it, and the books stand."""
    streams = await away.streams()
    await away.lose_engine()
    step(seconds)
    pings = [stream.parser.comments for stream in streams]
    reading = asyncio.create_task(away.read_on(streams))
    await until(lambda: all(s.parser.comments > n for s, n in zip(streams, pings, strict=True)))
    await away.find_engine()
    for transcript in await reading:
        check_whole(transcript)
    await check_billed_once(away.served, streams)


async def attach(served: Served, stream: Stream) -> Stream:
    """The stream of a client that returns with what it has."""
    again = await served.open(stream_id=stream.id, after=stream.transcript.last_id)
    again.transcript = stream.transcript
    return again


async def cut(away: Away, streams: list[Stream]) -> None:
    """Stop the process, as its clients see it."""

    async def to_the_cut(stream: Stream) -> None:
        async with stream:
            try:
                async for _ in stream.events():
                    pass
            except ConnectionResetError:
                pass

    await asyncio.gather(away.stop(), *map(to_the_cut, streams))
    assert not any(stream.transcript.done or stream.transcript.errors for stream in streams)


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
async def test_the_clock_steps_while_a_stream_is_suspended(
    away: Away, step: Callable[[int], None], seconds: int
):
    """Between two processes and within one: the stream waits for its time, and goes on when asked for."""
    streams = await away.streams()
    await cut(away, streams)
    step(seconds)
    served = await away.start(suspend_timeout_s=600.0)
    step(seconds)
    assert await served.runtime.suspensions.expire() == 0
    assert len(served.runtime.suspensions) == STREAMS
    for transcript in await away.read_on([await attach(served, stream) for stream in streams]):
        check_whole(transcript)
    await check_billed_once(served, streams)


@pytest.mark.parametrize("seconds", [HOUR_S, -HOUR_S])
async def test_a_suspended_stream_is_settled_in_time_whatever_the_clock_says(
    away: Away, step: Callable[[int], None], seconds: int
):
    """A clock that steps back does not keep it for ever."""
    streams = await away.streams()
    await cut(away, streams)
    step(seconds)
    served = await away.start(suspend_timeout_s=0.1)
    await until(lambda: served.logged("suspended_expired"))
    await check_books(served)
    outcomes = {row["outcome"] for row in rows(served.runtime.settings.data_dir).values()}
    assert outcomes == {"interrupted"}


Restart = Callable[[Away], Awaitable[None]]


async def there(_: Away) -> None:
    """The engine's server goes on while ours is restarted."""


async def lost_with_it(away: Away) -> None:
    """The engine's server is lost as well, and back before ours is."""
    await away.server.stop()
    await away.find_engine()


@pytest.mark.parametrize("engine", [there, lost_with_it])
async def test_streams_of_a_remote_engine_go_on_after_a_restart(away: Away, engine: Restart):
    """A new process asks the engine's server for the rest of each answer, behind what the old one had."""
    streams = await away.streams()
    await cut(away, streams)
    before = [stream.transcript.last_id for stream in streams]
    await engine(away)
    served = await away.start()
    transcripts = await away.read_on([await attach(served, stream) for stream in streams])
    for transcript, last_id in zip(transcripts, before, strict=True):
        check_whole(transcript)
        assert transcript.last_id > last_id
    await check_billed_once(served, streams)


async def test_a_remote_engine_that_is_lost_again_after_a_restart(away: Away):
    """The answers of the process before move as any others."""
    streams = await away.streams()
    await cut(away, streams)
    served = await away.start()
    again = [await attach(served, stream) for stream in streams]
    num_events = [stream.transcript.num_events for stream in again]
    for stream, before in zip(again, num_events, strict=True):
        await stream.read_events(before + 2)
    await away.lose_engine()
    reading = asyncio.create_task(away.read_on(again))
    await away.find_engine()
    for transcript in await reading:
        check_whole(transcript)
    await check_billed_once(served, streams)
