"""One stream over a real socket."""

from __future__ import annotations

from app.engine.scripted.engine import Script, scripted_text
from tests.support.servers import Serve, Spawn, chat
from tests.support.sse_client import fetch


async def test_stream_delivers_engine_text(serve: Serve):
    """A POST streams the engine's text and ends in [DONE]."""
    served = await serve(Script(tokens=30, seed=3))
    async with await served.open(chat()) as stream:
        transcript = await stream.to_end()
    assert transcript.content() == "".join(scripted_text(3, 0, 30))
    assert transcript.done
    assert transcript.ids[0] == 1


async def test_process_serves_and_stops(spawn: Spawn):
    """The command serves on a free port and SIGTERM ends it with status 0."""
    process = await spawn("tokens=5")
    port = await process.ready()
    answer = await fetch(port, "POST", "/api/chat/completions", chat(stream=False))
    assert answer.json()["choices"][0]["message"]["content"] == "".join(scripted_text(0, 0, 5))
    process.terminate()
    assert await process.exit_status() == 0
