"""Faults of remote servers: a false SGLang that misbehaves on cue, and the engine in front of it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from aiohttp import web

from app.core import ChatRequest, Counts, EngineLoad, Health
from app.engine.http.engine import RemoteEngine
from app.engine.http.pool import RemoteOptions
from app.errors import BadRequest, EngineFailed, EngineNotReady, EngineOverloaded
from tests.support.false_sglang import TOKENS, FalseServer, Fault, PlainModel, ask, frame, once


async def slams(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """Closes before the status line."""
    request.transport.close()


async def is_silent(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """Sends no headers."""
    await asyncio.sleep(30)


async def is_empty(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """Headers, then nothing more."""
    await response.prepare(request)
    await response.write_eof()


async def fails(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """A router whose worker is gone."""
    response.set_status(502)
    await response.prepare(request)
    await response.write_eof(b"<html>bad gateway</html>")


async def babbles(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """Something that is no event."""
    await response.prepare(request)
    await response.write(b'data: {"not": "ours"}\n\n')
    await asyncio.sleep(30)


async def is_full(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """SGLang's full queue: status 200, and the refusal as an event."""
    await response.prepare(request)
    finish = {"type": "abort", "status_code": 503, "message": "The request queue is full."}
    await response.write(frame(0, finish).replace(b"w0 ", b"").replace(b"[0]", b"[]"))
    await response.write_eof()


async def is_refused(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """Four tokens, then SGLang's refusal of what was asked for."""
    await response.prepare(request)
    for number in range(1, 5):
        await response.write(frame(number))
    finish = {"type": "abort", "status_code": 400, "message": "It cannot be."}
    await response.write(frame(4, finish))
    await response.write_eof()


def headers_s(fault: Fault) -> float:
    """Time for the headers: short where none come, and else so long that nothing is late."""
    return 1.0 if fault is is_silent else 10.0


EARLY = [slams, is_silent, is_empty, fails, babbles, is_full]


@pytest.mark.parametrize("fault", EARLY, ids=lambda fault: fault.__name__)
async def test_a_fault_before_the_first_token_is_not_seen(
    servers: list[FalseServer], connect: Any, fault: Fault
) -> None:
    """The request goes to the other server, under another id; the answer is whole, every token once."""
    engine = await connect(*servers, headers_s=headers_s(fault))
    shared = once(fault)
    for server in servers:
        server.fault = shared
    deltas = await ask(engine)
    assert [token for delta in deltas for token in delta.token_ids] == list(range(1, TOKENS + 1))
    assert [len(server.asked) for server in servers] == [1, 1]
    rids = [server.asked[0]["rid"] for server in servers]
    assert len(set(rids)) == 2
    assert engine.pop_emitted_tokens("r") == TOKENS


@pytest.mark.parametrize("fault", [slams, is_silent, babbles], ids=lambda fault: fault.__name__)
async def test_the_only_server_is_asked_again(servers: list[FalseServer], connect: Any, fault: Fault) -> None:
    """A connection that broke says little of the server."""
    engine = await connect(servers[0], headers_s=headers_s(fault))
    servers[0].fault = once(fault)
    assert len(await ask(engine)) == TOKENS
    assert len(servers[0].asked) == 2


async def test_a_server_that_is_gone_is_an_error_before_any_delta(
    servers: list[FalseServer], connect: Any
) -> None:
    """Nobody listens: a 503 that says when to come again, and the engine is not ready."""
    engine = await connect(servers[0])
    prompt = await engine.render(ChatRequest("r", "owner", "model", {"messages": []}, 0))
    await servers[0].stop()
    with pytest.raises(EngineNotReady) as refused:
        await anext(engine.generate("r", prompt))
    assert refused.value.retry_after_s
    async with asyncio.timeout(5):
        while engine.health() is not Health.STARTING:
            await asyncio.sleep(0.01)


async def test_full_servers_are_overloaded_and_not_broken(servers: list[FalseServer], connect: Any) -> None:
    """Where every server is full the caller is told so, after each was asked once."""
    engine = await connect(*servers)
    for server in servers:
        server.fault = is_full
    with pytest.raises(EngineOverloaded, match="queue is full"):
        await ask(engine)
    assert [len(server.asked) for server in servers] == [1, 1]
    assert engine.health() is Health.READY


async def test_a_server_that_comes_back_is_used_again(servers: list[FalseServer], connect: Any) -> None:
    """A probe finds it; requests are not spent on finding out."""
    engine = await connect(servers[0])
    await servers[0].stop()
    async with asyncio.timeout(5):
        while engine.health() is Health.READY:
            await asyncio.sleep(0.01)
    await servers[0].start()
    async with asyncio.timeout(10):
        while engine.health() is not Health.READY:
            await asyncio.sleep(0.01)
    assert len(await ask(engine)) == TOKENS


async def test_a_server_that_comes_back_with_another_model_is_not_used(
    servers: list[FalseServer], connect: Any
) -> None:
    """Prompts are rendered for one model."""
    engine = await connect(servers[0])
    await servers[0].stop()
    async with asyncio.timeout(5):
        while engine.health() is Health.READY:
            await asyncio.sleep(0.01)
    servers[0].name = "another"
    await servers[0].start()
    server = engine._pool.servers[0]
    assert not await engine._pool._is_back(server)


async def test_an_abort_ends_with_what_the_server_says(servers: list[FalseServer], connect: Any) -> None:
    """The server is asked to stop each choice; its last event has the counts."""
    engine = await connect(servers[0])
    servers[0].tokens, servers[0].pause_s = 10_000, 0.005
    prompt = await engine.render(ChatRequest("r", "owner", "model", {"messages": []}, 0, n=2))
    deltas = []
    async for delta in engine.generate("r", prompt):
        deltas.append(delta)
        if len(deltas) == 6:
            engine.abort("r")
    for choice in range(2):
        mine = [delta for delta in deltas if delta.choice == choice]
        assert mine[-1].finish_reason == "abort"
        assert mine[-1].counts.completion_tokens == sum(len(delta.token_ids) for delta in mine)
    assert servers[0].aborted == {"r-000-0", "r-001-0"}


async def test_an_abort_that_is_not_answered_ends_all_the_same(
    servers: list[FalseServer], connect: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A router has no route for it: the connection is closed, and the counts are those received."""
    monkeypatch.setattr("app.engine.http.generation.ABORT_WAIT_S", 0.2)
    monkeypatch.setattr("app.engine.http.generation.ABORT_AGAIN_S", 0.1)
    engine = await connect(servers[0])
    servers[0].fault = babbles_not
    prompt = await engine.render(ChatRequest("r", "owner", "model", {"messages": []}, 0))
    deltas = []
    async for delta in engine.generate("r", prompt):
        deltas.append(delta)
        engine.abort("r")
    assert deltas[-1].finish_reason == "abort"
    assert deltas[-1].counts == Counts(3, 1, 2, 0)


async def babbles_not(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
    """One token, then nothing for a long time."""
    await response.prepare(request)
    await response.write(frame(1))
    await asyncio.sleep(60)


async def test_a_choice_that_fails_leaves_no_other_running(servers: list[FalseServer], connect: Any) -> None:
    """The others' connections are closed, which makes SGLang abort."""
    engine = await connect(servers[0])
    servers[0].tokens, servers[0].pause_s = 10_000, 0.005
    other_begun = asyncio.Event()

    async def one_fails(server: FalseServer, response: web.StreamResponse, request: web.Request) -> None:
        body = server.asked[-1]
        if body["index"] == 1:
            await other_begun.wait()
            await is_refused(server, response, request)
        else:
            other_begun.set()
            await server.answer(response, request, body)

    servers[0].fault = one_fails
    with pytest.raises(BadRequest):
        await ask(engine, n=2)
    async with asyncio.timeout(5):
        while engine._tasks or servers[0].num_left < 1:
            await asyncio.sleep(0.01)


async def test_connections_are_used_again(servers: list[FalseServer], connect: Any) -> None:
    """Twenty answers, one after the other, need no twenty connections."""
    engine = await connect(servers[0])
    for number in range(20):
        await ask(engine, f"r{number}")
    assert sum(map(len, engine._session.connector._conns.values())) <= 3


async def test_the_load_is_the_sum_of_the_servers(servers: list[FalseServer], connect: Any) -> None:
    """As each last said."""
    engine = await connect(*servers)
    async with asyncio.timeout(5):
        while engine.load().num_running_reqs != 4:
            await asyncio.sleep(0.01)
    assert replace(engine.load(), faults={}, moved={}) == EngineLoad(4, 2, 60, 2000, 11.0)


async def test_closing_ends_what_runs(servers: list[FalseServer], connect: Any) -> None:
    """A generation in progress fails, and no task is left."""
    engine = await connect(servers[0])
    servers[0].tokens, servers[0].pause_s = 10_000, 0.005
    asking = asyncio.create_task(ask(engine))
    async with asyncio.timeout(5):
        while not engine.pop_emitted_tokens("r"):
            await asyncio.sleep(0.01)
    await engine.aclose()
    await engine.aclose()
    with pytest.raises(EngineFailed):
        await asking
    assert not engine._tasks
    assert engine.health() is Health.DEAD


async def test_a_start_without_a_server_says_which(servers: list[FalseServer]) -> None:
    """The message names the address and not the key."""
    await servers[0].stop()
    engine = RemoteEngine(RemoteOptions([servers[0].url], api_key="secret", start_s=0.3), PlainModel)
    with pytest.raises(EngineFailed, match="no connection") as failed:
        await engine.start()
    assert servers[0].url in failed.value.message
    assert "secret" not in failed.value.message + repr(engine._options)
    assert engine._session is None
