"""A restart of the server loses no stream: what SIGTERM cuts goes on when its client returns."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from app.engine.scripted.engine import scripted_text
from tests.support.servers import ServerProcess, Spawn, chat
from tests.support.sse_client import Response, Stream, Transcript, fetch, open_stream, until

PATH = "/api/chat/completions"
TOKENS = 120
SLOW = f"rate=40,tokens={TOKENS}"
FAST = f"rate=400,tokens={TOKENS}"


async def cut(stream: Stream) -> Transcript:
    """What a client has of a stream when its connection ends; the stream itself has not ended."""
    async with stream:
        try:
            async for _ in stream.events():
                pass
        except ConnectionResetError:
            pass
    transcript = stream.transcript
    transcript.check_ids()
    assert not transcript.done
    assert transcript.errors == []
    return transcript


async def returned(port: int, stream: Stream) -> Transcript:
    """The rest of a stream, for a client that returns with what it has."""
    again = await open_stream(port, stream_id=stream.id, after=stream.transcript.last_id)
    async with again:
        again.transcript = stream.transcript
        return await again.to_end()


def rows(tmp_path: Path, query: str) -> list[tuple[Any, ...]]:
    """What a query finds in the store of the servers."""
    connection = sqlite3.connect(tmp_path / "data" / "tokenring.db")
    try:
        return connection.execute(query).fetchall()
    finally:
        connection.close()


def bills(tmp_path: Path) -> dict[str, tuple[Any, ...]]:
    """Each request's state, outcome and tokens, by id."""
    query = "SELECT id, state, outcome, prompt_tokens, completion_tokens, withheld_tokens FROM requests"
    return {request_id: tuple(bill) for request_id, *bill in rows(tmp_path, query)}


async def stop(process: ServerProcess, streams: Sequence[Stream]) -> None:
    """SIGTERM, as the clients of these streams see it; the process exits with 0."""
    process.terminate()
    await asyncio.gather(*map(cut, streams))
    assert await process.exit_status() == 0
    assert not process.noise


async def test_every_stream_goes_on_where_it_was_cut(spawn: Spawn, tmp_path: Path):
    """16 streams, a stop in their middle, a start: every client has the text of an undisturbed answer."""
    process = await spawn(SLOW, "--drain-timeout-s", "1")
    port = await process.ready()
    streams = [await open_stream(port, chat(f"question {number}", seed=number)) for number in range(16)]
    await asyncio.gather(*(stream.read_events(4) for stream in streams))
    await stop(process, streams)
    assert {bill[0] for bill in bills(tmp_path).values()} == {"reserved"}
    before = [stream.transcript.last_id for stream in streams]
    again = await spawn(FAST)
    port = await again.ready()
    transcripts = await asyncio.gather(*(returned(port, stream) for stream in streams))
    for seed, (transcript, last_id) in enumerate(zip(transcripts, before, strict=True)):
        assert transcript.content() == "".join(scripted_text(seed, 0, TOKENS))
        assert transcript.finish_reasons == {0: "stop"}
        assert transcript.done
        assert transcript.last_id > last_id
    again.terminate()
    assert await again.exit_status() == 0
    settled = bills(tmp_path)
    assert set(settled) == {stream.id for stream in streams}
    assert {(*bill[:2], *bill[3:]) for bill in settled.values()} == {("settled", "stop", TOKENS, 0)}
    assert rows(tmp_path, "SELECT requests, completion_tokens FROM usage_daily") == [(16, 16 * TOKENS)]
    assert rows(tmp_path, "SELECT * FROM suspended") == []
    assert not [line for process in (process, again) for line in process.log if line["level"] == "error"]
    assert not [line for line in again.log if line["event"] == "ledger_differs"]
