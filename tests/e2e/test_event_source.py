"""A browser's EventSource, as npm's `eventsource` implements it, on a connection that keeps dropping."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from app.engine.scripted.engine import Script, ScriptedEngine, scripted_text
from app.engine.scripted.service import Run
from tests.support.sdks import Case, Sdk
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import until


class Halfway(ScriptedEngine):
    """Stops after 15 tokens until a test lets it go on: the client comes back a second after each cut."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.go_on = asyncio.Event()
        self._pauses = 0

    async def _pause(self, run: Run, duration_s: float) -> None:
        await super()._pause(run, duration_s)
        self._pauses += 1
        if self._pauses > 15:  # the first is that of the prompt
            await self.go_on.wait()


async def cut(served: Served, stream_id: str, after: int) -> None:
    """Cut the stream's only connection once its client is past event `after`."""
    readers = served.stream(stream_id).readers
    reader = await until(lambda: next((r for r in readers if r.sink and r.cursor > after), None))
    reader.sink.abort()
    await until(lambda: reader not in readers)


@pytest.mark.timeout(300)  # the package may have to be installed first
async def test_event_source_comes_back_and_is_ended(node: Sdk, serve: Serve):
    """It reconnects by itself, as `retry:` asks, gets all text once, and stops at 204."""
    served = await serve(Script(tokens=30, rate=25), engine_type=Halfway, heartbeat_s=0.1)
    assert isinstance(served.engine, Halfway)
    async with await served.open(chat()) as stream:
        await stream.read_events(1)
    url = f"http://127.0.0.1:{served.port}/api/chat/completions/{stream.id}"
    case = Case("follow", "event_source", bool, {"url": url})
    following = asyncio.create_task(node.run(served.port, case))
    await cut(served, stream.id, after=3)
    await cut(served, stream.id, after=10)
    served.engine.go_on.set()
    seen = await following
    assert seen["opened"] == 3
    assert seen["errors"][-1] == 204
    assert seen["data"][-1] == "[DONE]"
    assert seen["ids"] == sorted(set(seen["ids"]))
    chunks = [json.loads(data) for data in seen["data"][:-1]]
    text = "".join(c["delta"].get("content", "") for chunk in chunks for c in chunk["choices"])
    assert text == "".join(scripted_text(0, 0, 30))
