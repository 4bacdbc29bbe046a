"""Hundreds of clients that do anything at any time leave nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import random
import weakref
from pathlib import Path
from typing import Any

import pytest

from app.core import ChatRequest
from app.engine.scripted.engine import Script
from tests.support.cycles import few_cycles
from tests.support.screens import BLOCKED, word_models
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import Connection, request_bytes, until

PATH = "/api/chat/completions"


def script(request: ChatRequest) -> Script:
    """A different answer per request, some of which fail, hang or are endless."""
    content = request.body["messages"][0]["content"]
    if content == "hello":
        return Script(tokens=5)
    rng = random.Random(content)
    return Script(
        tokens=rng.choice((1, 20, 200, 10**4)),
        rate=rng.choice((0, 200, 2000)),
        prefill_s=rng.choice((0, 0.05)),
        tool=rng.choice(("", "weather")),
        fault=rng.choice(("", "", "", "fail", "hang", "overload")),
        fault_after=rng.choice((0, 5)),
    )


async def misbehave(served: Served, rng: random.Random) -> None:
    """One client's life: requests, cancels, returns and departures, in any order."""
    stream_ids: list[str] = []
    for _ in range(rng.randint(1, 5)):
        async with await Connection.to(served.port) as connection:
            await connection.request(*any_request(rng, stream_ids))
            if rng.random() < 0.15:
                continue
            with contextlib.suppress(TimeoutError):
                await read_a_little(connection, rng, stream_ids)
            if rng.random() < 0.5:
                connection.reset()


async def read_a_little(connection: Connection, rng: random.Random, stream_ids: list[str]) -> None:
    """Some of a response, or all of it, for a moment."""
    async with asyncio.timeout(rng.choice((0.05, 0.3))):
        head = await connection.head()
        if "x-request-id" in head.headers:
            stream_ids.append(head.headers["x-request-id"])
        async for _ in connection.pieces(head):
            if rng.random() < 0.05:
                break


def any_request(rng: random.Random, stream_ids: list[str]) -> tuple[str, str, Any, dict[str, str]]:
    """A chat, or something about an earlier one."""
    headers = {"last-event-id": str(rng.randint(0, 9))} if rng.random() < 0.3 else {}
    if stream_ids and rng.random() < 0.6:
        stream_id = rng.choice(stream_ids)
        method, path = rng.choice(
            [
                ("GET", f"{PATH}/{stream_id}"),
                ("GET", f"/v1/chat/completions/{stream_id}"),
                ("DELETE", f"{PATH}/{stream_id}"),
                ("DELETE", f"/v1/chat/completions/{stream_id}"),
                ("POST", f"{PATH}/{stream_id}/cancel"),
            ]
        )
        return method, path, None, headers
    if rng.random() < 0.4:
        headers["idempotency-key"] = f"key {rng.randint(0, 20)}"
    content = f"chat {rng.randint(0, 20)}"
    return "POST", PATH, chat(content, n=rng.choice((1, 3)), stream=rng.random() < 0.8), headers


@pytest.mark.parametrize("seed", range(3))
async def test_nothing_is_left(serve: Serve, seed: int):
    """After 100 clients of every kind no stream, key, timer, task, reader or connection remains."""
    settings = {"resume_grace_s": 0.1, "retention_s": 0.1, "heartbeat_s": 0.05, "stream_bytes": 4096}
    served = await serve(script, max_live_streams=50, **settings)
    tasks_before = len(asyncio.all_tasks())
    rng = random.Random(seed)
    clients = [misbehave(served, random.Random(rng.random())) for _ in range(100)]
    await asyncio.gather(*clients)
    streams = served.runtime.streams
    await until(lambda: served.running == 0 and not served.connections)
    await until(lambda: not streams._streams and not streams._live)  # a deleted one still settles
    assert not streams._finished
    assert not streams._keys
    assert not streams._grace
    assert not streams._tasks
    await until(lambda: not streams._forgotten)
    await until(lambda: len(asyncio.all_tasks()) == tasks_before)
    for event in ("request_broke", "pipeline_broke", "generation_broke"):
        assert not served.logged(event)
    assert (await served.post(chat(stream=False))).status == 200


@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_leaves_no_cycles(serve: Serve, stream: bool):
    """What a request took is freed without the garbage collector, which looks seldom."""
    served = await serve(Script(tokens=3), retention_s=0)
    for _ in range(5):
        await served.post(chat(stream=stream))
    with few_cycles():
        for _ in range(20):
            await served.post(chat(stream=stream))
        await until(lambda: not served.runtime.streams._finished)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("path", "sent"),
    [
        (PATH, {"messages": [{"role": "user", "content": "a " * 200}]}),
        (PATH, {"max_tokens": 500}),
        (PATH, {"temperature": 9}),
        (PATH, {"model": "other"}),
        ("/v1/completions", {"prompt": "a " * 200}),
        ("/v1/completions", {"prompt": [1, 2_000_000_000]}),
    ],
    ids=["long messages", "many tokens", "a bad value", "no model", "a long prompt", "a bad id"],
)
async def test_a_refused_request_leaves_no_cycles(
    serve: Serve, path: str, sent: dict[str, Any], *, stream: bool
):
    """An error has the frames it came through, and these the request: a long one takes megabytes."""
    served = await serve(Script(tokens=3, context=128), retention_s=0)
    body = {"model": "scripted", "stream": stream, **({} if "prompt" in sent else chat()), **sent}
    body["stream"] = stream
    for _ in range(5):
        assert (await served.call("POST", path, body)).status in (400, 404)
    with few_cycles():
        for _ in range(20):
            await served.call("POST", path, body)
        await until(lambda: not served.runtime.streams._finished)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_blocked_prompt_leaves_no_cycles(serve: Serve, tmp_path: Path, *, stream: bool):
    """Nor does its verdict hold what it read."""
    served = await serve(
        Script(tokens=3), load_models=lambda: word_models(tmp_path / "models"), safety="on", retention_s=0
    )
    body = chat(f"tell me of {BLOCKED} things", stream=stream)
    for _ in range(5):
        assert (await served.post(body)).status == 400
    with few_cycles():
        for _ in range(20):
            await served.post(body)
        await until(lambda: not served.runtime.streams._finished)


@pytest.mark.parametrize("fault", ["fail", "overload"])
async def test_a_failed_generation_leaves_no_cycles(serve: Serve, fault: str):
    """The engine's error ends the stream, and is freed with it."""
    served = await serve(Script(tokens=20, fault=fault, fault_after=0), retention_s=0)
    for _ in range(5):
        await served.post(chat(stream=False))
    with few_cycles():
        for _ in range(20):
            assert (await served.post(chat(stream=False))).status >= 500
        await until(lambda: not served.runtime.streams._finished)


async def test_a_body_that_breaks_off_is_no_error_of_the_server(serve: Serve):
    """A chunk that is none is 400; what the application sees of it is a client that has left."""
    served = await serve(Script(tokens=3))
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n"
    async with await Connection.to(served.port) as connection:
        await connection.send(head + b"no chunk")
        answer = await connection.response()
    assert (answer.status, answer.error()["code"]) == (400, "invalid_http")
    await until(lambda: not served.connections)
    assert not [entry for entry in served.logged("refused") if entry["status"] == 500]


@pytest.mark.parametrize(
    ("sent", "answered"),
    [
        (b"", False),
        (b"POST /api/chat/completions HTTP/1.1\r\n", False),
        (request_bytes("POST", PATH, chat(stream=False)), True),
        (b"not HTTP\r\n\r\n", True),
    ],
    ids=["nothing", "half a head", "a request", "nonsense"],
)
async def test_a_connection_that_is_reset_is_let_go_of(serve: Serve, sent: bytes, answered: bool):
    """No timer holds it, or what was asked last on it, whatever it was waiting for."""
    served = await serve(Script(tokens=3))
    async with await Connection.to(served.port) as connection:
        await connection.send(sent)
        if answered:
            await connection.response()
        await until(lambda: served.connections)
        [protocol] = map(weakref.ref, served.connections)
        connection.reset()
    await until(lambda: not served.connections)
    # uvicorn's timer would hold it for 5 s.
    await until(lambda: (gc.collect(), protocol() is None)[1], timeout_s=3.0)
