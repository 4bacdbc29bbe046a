"""A remote server dies under clients of ours: they see a pause, and the ledger sees nothing."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from app.core import ModelCard
from app.engine.http.engine import RemoteEngine
from app.engine.http.model import Facts
from app.engine.http.pool import RemoteOptions
from tests.support.false_sglang import PROMPT_TOKENS, FalseServer, PlainModel, moved, words
from tests.support.servers import Serve, chat
from tests.support.sse_client import until

TOKENS = 80
STREAMS = 16


class LargeModel(PlainModel):
    """A model with room for all of them."""

    def __init__(self, facts: Facts) -> None:
        super().__init__(facts)
        self.card = ModelCard("scripted", 1000, 100_000, 900, frozenset())


async def test_clients_of_a_lost_server_get_whole_answers(serve: Serve, servers: list[FalseServer]) -> None:
    """Sixteen streams, one of two servers gone, then the other for a while: text, ids and bills are whole."""
    for server in servers:
        server.tokens, server.pause_s = TOKENS, 0.1  # none ends before both were lost
    options = RemoteOptions([server.url for server in servers], poll_s=0.05)
    engine = RemoteEngine(options, LargeModel)
    served = await serve(ready_engine=engine, heartbeat_s=0.05, safety="off")
    await until(lambda: not any(server.breaker.is_open for server in engine._pool.servers))
    body = chat(max_tokens=TOKENS, stream_options={"include_usage": True})
    streams = [await served.open(body) for _ in range(STREAMS)]
    reading = [asyncio.create_task(stream.to_end()) for stream in streams]
    await until(lambda: all(server.num_answering == STREAMS / 2 for server in servers))
    await servers[0].stop()
    await until(lambda: moved(engine) == {"resumed": STREAMS / 2})
    await servers[1].stop()
    await until(lambda: not engine._pool.is_healthy)
    refused = await served.post(chat("another"))
    assert (refused.status, refused.headers.get("retry-after") is not None) == (503, True)
    pings = [stream.parser.comments for stream in streams]
    await until(lambda: all(s.parser.comments > n for s, n in zip(streams, pings, strict=True)))
    servers[0].pause_s = 0.01
    await servers[0].start()
    for transcript in await asyncio.gather(*reading):
        transcript.check_ids()
        assert transcript.content() == words(range(1, TOKENS + 1))
        assert transcript.finish_reasons == {0: "length"}
        assert not transcript.errors
        assert transcript.usage is not None
        assert transcript.usage["completion_tokens"] == TOKENS
        assert transcript.usage["prompt_tokens"] == PROMPT_TOKENS
    usage: dict[str, Any] = json.loads((await served.call("GET", "/api/usage")).body)
    assert (usage["requests"], usage["output_tokens"]) == (STREAMS, STREAMS * TOKENS)
    metrics = (await served.call("GET", "/metrics")).body.decode()
    assert 'tokenring_remote_moved_total{model="scripted",outcome="resumed"} 24.0' in metrics
    assert 'tokenring_ledger_differing_requests_total{model="scripted"} 0.0' in metrics
