"""Real SGLang is freed when its client is gone for good, or says stop."""

from __future__ import annotations

import asyncio

import pytest

from tests.support.servers import ServerProcess, chat
from tests.support.sse_client import Stream, fetch, open_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timed, pytest.mark.timeout(300)]

GRACE_S = 5.0
"""As the fixture sets it."""


async def running(port: int) -> int:
    """Requests that SGLang has in hand, in its own words."""
    engine = (await fetch(port, "GET", "/readyz")).json()["engine"]
    return engine["num_running_reqs"] + engine["num_queue_reqs"]


async def stopped_after_s(port: int, since_s: float) -> float:
    """How long after `since_s` SGLang ran nothing any more."""
    loop = asyncio.get_running_loop()
    while await running(port):
        assert loop.time() < since_s + 20
        await asyncio.sleep(0.01)
    return loop.time() - since_s


async def long_stream(port: int) -> Stream:
    """A generation of minutes, some of which has come."""
    model = (await fetch(port, "GET", "/v1/models")).json()["data"][0]["id"]
    stream = await open_stream(port, chat(model=model, ignore_eos=True, max_tokens=7000, n=2))
    await stream.read_events(10)
    async with asyncio.timeout(20):
        while await running(port) < 2:  # SGLang writes it down every so many steps
            await asyncio.sleep(0.01)
    return stream


async def test_sglang_stops_within_a_second_of_the_grace_period(sglang_server: ServerProcess):
    """A client gone for longer than the grace period: SGLang's running count is 0 within 1 s after it."""
    port = await sglang_server.ready()
    stream = await long_stream(port)
    left_s = asyncio.get_running_loop().time()
    stream.connection.reset()
    assert GRACE_S - 0.1 < await stopped_after_s(port, left_s) < GRACE_S + 1


async def test_delete_stops_sglang_within_200_ms(sglang_server: ServerProcess):
    """DELETE brings SGLang's running count to 0 within 200 ms, and the stream ends with what was made."""
    port = await sglang_server.ready()
    took_s = []
    for _ in range(3):  # the best of three: the machine may be busy, the server may not
        async with await long_stream(port) as stream:
            deleted_s = asyncio.get_running_loop().time()
            await fetch(port, "DELETE", f"/api/chat/completions/{stream.id}")
            took_s.append(await stopped_after_s(port, deleted_s))
            transcript = await stream.to_end()
            assert transcript.finish_reasons == {0: "stop", 1: "stop"}
            assert transcript.done
    assert min(took_s) < 0.2
