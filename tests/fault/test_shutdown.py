"""SIGTERM in every phase: nothing new, what runs may finish, what cannot is told, and the process ends."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from pathlib import Path

import pytest

from app.engine.scripted.engine import scripted_text
from tests.support.servers import ROOT, ServerProcess, Spawn, chat
from tests.support.sse_client import Connection, Stream, fetch, open_stream, until

PATH = "/api/chat/completions"
NO_SUSPENSION = ("--suspend-timeout-s", "0")
"""For what these tests are about; what is suspended is the subject of test_restart.py."""


async def begin(process: ServerProcess, tokens: int) -> tuple[int, Stream]:
    """A stream of that many tokens, of which some have come."""
    port = await process.ready()
    stream = await open_stream(port, chat())
    await stream.read_events(5)
    return port, stream


async def test_sigterm_lets_streams_finish(spawn: Spawn):
    """SIGTERM in the middle of a stream: it is read to its end, then the process exits with 0."""
    process = await spawn("rate=50,tokens=60")
    _, stream = await begin(process, 60)
    process.terminate()
    async with stream:
        transcript = await stream.to_end()
    assert transcript.content() == "".join(scripted_text(0, 0, 60))
    assert transcript.finish_reasons == {0: "stop"}
    assert transcript.done
    assert await process.exit_status() == 0


async def test_port_answers_while_draining(spawn: Spawn):
    """While it drains, the server says so, refuses new work, and lets clients return to live streams."""
    process = await spawn("rate=25,tokens=100")
    port, stream = await begin(process, 100)
    process.terminate()
    await process.logged("draining")
    ready = await fetch(port, "GET", "/readyz")
    assert (ready.status, ready.json()["phase"]) == (503, "draining")
    assert (await fetch(port, "GET", "/healthz")).status == 200
    refused = await fetch(port, "POST", PATH, chat())
    assert refused.refusal() == (503, "draining", None)
    assert int(refused.headers["retry-after"]) > 0
    stream.connection.reset()
    async with await open_stream(port, stream_id=stream.id, after=stream.transcript.last_id) as again:
        rest = await again.to_end()
    assert rest.done
    assert stream.transcript.content() + rest.content() == "".join(scripted_text(0, 0, 100))
    assert await process.exit_status() == 0


async def test_drain_timeout_ends_streams_truthfully(spawn: Spawn):
    """Where no stream is suspended, one that outlasts the drain timeout ends in an error, not as if whole."""
    process = await spawn("rate=50,tokens=100000", "--drain-timeout-s", "0.5", *NO_SUSPENSION)
    _, stream = await begin(process, 100_000)
    process.terminate()
    async with stream:
        transcript = await stream.to_end()
    assert transcript.errors[0]["code"] == "draining"
    assert transcript.finish_reasons == {0: "stop"}
    assert transcript.done
    assert await process.exit_status(10) == 0


async def test_non_streaming_answer_cut_by_shutdown_is_an_error(spawn: Spawn):
    """A non-streaming request that outlasts the drain timeout is refused, not answered in part."""
    process = await spawn("rate=50,tokens=100000", "--drain-timeout-s", "0.2")
    port = await process.ready()
    async with await Connection.to(port) as connection:
        await connection.request("POST", PATH, chat(stream=False))
        async with await open_stream(port, chat()) as other:  # so that the first has been taken in
            await other.read_events(1)
            process.terminate()
            answer = await connection.response()
    assert answer.refusal() == (503, "draining", None)
    assert await process.exit_status(10) == 0


async def test_sigterm_while_the_engine_starts(spawn: Spawn):
    """The port answers while the engine starts, and SIGTERM then ends the process at once, with 0."""
    process = await spawn("start_s=60")
    port = await process.port()
    assert (await fetch(port, "GET", "/healthz")).status == 200
    ready = await fetch(port, "GET", "/readyz")
    assert ready.status == 503
    assert ready.json()["phase"].startswith("starting")
    refused = await fetch(port, "POST", PATH, chat())
    assert refused.refusal() == (503, "engine_not_ready", None)
    assert int(refused.headers["retry-after"]) > 0
    process.terminate()
    assert await process.exit_status() == 0
    assert not process.noise


SLOW_STORE = """
import os, sys, threading, time
import app.store.database as database
from app.__main__ import run
prepare, end = database.prepare, os._exit
def prepare_slowly(*args):
    print('{"event": "opening"}', file=sys.stderr, flush=True)
    time.sleep(2)
    prepare(*args)
def end_after_the_store(status):
    for thread in threading.enumerate():
        if "_connection_worker_thread" in thread.name:
            thread.join()
    end(status)
database.prepare, os._exit = prepare_slowly, end_after_the_store
run()
"""
"""A server whose store takes its time to open, and whose end waits for the store's threads."""


async def test_sigterm_while_the_store_opens(tmp_path: Path):
    """What the start had opened is closed before the process ends, with 0 and without a word."""
    flags = ("serve", "--engine", "scripted", "--safety", "off", "--port", "0", "--log-format", "json")
    pipe, environ = asyncio.subprocess.PIPE, {**os.environ, "PYTHONPATH": str(ROOT)}
    process = ServerProcess(
        await asyncio.create_subprocess_exec(
            sys.executable, "-c", SLOW_STORE, *flags, cwd=tmp_path, env=environ, stderr=pipe
        )
    )
    try:
        await process.logged("opening")
        await process.port()
        process.terminate()
        assert await process.exit_status() == 0
        assert not process.noise
    finally:
        await process.close()


@pytest.mark.parametrize("tokens", [30_000, 12500])
async def test_stalled_clients_do_not_hold_up_the_end(spawn: Spawn, tokens: int):
    """SIGTERM ends the process though clients hold their connections and never read."""
    process = await spawn(f"tokens={tokens}", "--drain-timeout-s", "1")
    port = await process.ready()
    async with contextlib.AsyncExitStack() as stalled:
        for _ in range(3):
            await stalled.enter_async_context(await open_stream(port, chat(), receive_buffer_bytes=4096))
        await until(lambda: sum(line["event"] == "request" for line in process.log) == 3, timeout_s=100)
        process.terminate()
        assert await process.exit_status(15) == 0


async def test_second_signal_ends_streams_at_once(spawn: Spawn):
    """An impatient second SIGTERM waits for no stream: each ends with a truthful error, the exit is clean."""
    process = await spawn("rate=50,tokens=4000", *NO_SUSPENSION)
    _, stream = await begin(process, 4000)
    process.terminate()
    await process.logged("draining")
    process.terminate()
    async with stream:
        transcript = await stream.to_end()
    assert [e["code"] for e in transcript.errors] == ["draining"]
    assert transcript.done
    assert await process.exit_status() == 0


async def test_engine_death_ends_the_process(spawn: Spawn):
    """When the engine dies, every stream is told, and the process exits with 3 for its supervisor."""
    process = await spawn("rate=20,tokens=1000,fault=die,fault_after=20")
    port = await process.ready()
    streams = await asyncio.gather(*(open_stream(port, chat()) for _ in range(3)))
    transcripts = await asyncio.gather(*(stream.to_end() for stream in streams))
    for stream, transcript in zip(streams, transcripts, strict=True):
        stream.connection.close()
        assert [e["code"] for e in transcript.errors] == ["engine_failed"]
        assert transcript.done
    assert await process.exit_status(10) == 3
    assert not process.noise
