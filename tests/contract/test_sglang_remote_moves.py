"""Real SGLang servers that are killed in mid-answer: answers go on elsewhere, as if nothing had happened."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.core import ChatRequest, Engine
from app.engine.child_server import ChildCommand, ChildServer
from app.engine.http.engine import RemoteEngine
from app.engine.http.pool import RemoteOptions
from app.engine.sglang.args import SGLangOptions
from app.engine.sglang.platform import prepare_process
from app.errors import EngineFailed
from scripts.benchmarks.bare_server import bare_server_command
from tests.support.engines import Answer, ask, chat, fresh_rid
from tests.support.sse_client import until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400), pytest.mark.filterwarnings("default")]


def bare_server(port: int) -> ChildCommand:
    """SGLang as anybody may have started it."""
    *argv, arguments = bare_server_command(SGLangOptions(server_args={"random_seed": 7}), port)
    return ChildCommand([*argv, json.dumps(json.loads(arguments))])


@pytest.fixture(scope="module")
async def pair(anyio_backend: Any, spawning: None) -> AsyncIterator[tuple[RemoteEngine, list[ChildServer]]]:
    """Two foreign servers of one model, and the engine in front of them."""
    from app.engine.sglang.remote import RemoteModelOptions, load_remote_model

    prepare_process()
    servers = [ChildServer(bare_server, first_pause_s=0.1) for _ in range(2)]
    for server in servers:
        await server.start()
    options = RemoteOptions([server.url for server in servers], start_s=300)
    engine = RemoteEngine(options, lambda facts: load_remote_model(facts, RemoteModelOptions()))
    try:
        await engine.start()
        await both_well(engine)
        yield engine, servers
    finally:
        await engine.aclose()
        for server in servers:
            await server.aclose()


async def both_well(engine: RemoteEngine) -> None:
    """Wait until both servers take requests."""
    async with asyncio.timeout(300):
        while any(server.breaker.is_open for server in engine._pool.servers):
            await asyncio.sleep(0.1)


def requests() -> list[ChatRequest]:
    """Sixteen of many kinds, greedy."""
    questions = [
        "How do I resume a stream?",
        "What is a token ring? 漢字 é",
        "Tell me a story.",
        "Who are you?",
    ]
    options: list[dict[str, Any]] = [
        {},
        {"logprobs": True, "top_logprobs": 2},
        {"stop": ["token ", "zzz"], "ignore_eos": False},
        {"min_tokens": 60, "ignore_eos": False},
    ]
    return [
        chat(question, **({"temperature": 0, "max_tokens": 200, "ignore_eos": True} | option))
        for question in questions
        for option in options
    ]


def again(request: ChatRequest) -> ChatRequest:
    """The same under another id."""
    return dataclasses.replace(request, request_id=fresh_rid())


def comparable(answer: Answer) -> tuple[Any, ...]:
    """What a client can see of an answer, but for the last digits of probabilities."""
    scored = [
        (entry["token"], [top["token"] for top in entry["top_logprobs"]]) for entry in answer.logprobs()
    ]
    counts = answer.counts()._replace(cached_tokens=0)
    return (
        answer.text(),
        answer.token_ids(),
        answer.finish_reason(),
        answer.of()[-1].matched_stop,
        counts,
        scored,
    )


async def test_sixteen_answers_survive_one_of_two_servers(pair: Any) -> None:
    """Each ends as it does undisturbed: text, ids, counts, stop and logprobs."""
    engine, servers = pair
    asked = requests()
    undisturbed = await asyncio.gather(*(ask(engine, request) for request in asked))
    repeated = [again(request) for request in asked]
    asking = [asyncio.create_task(ask(engine, request)) for request in repeated]
    victim = engine._pool.servers[0]
    await until(lambda: victim.num_open >= 4 and _tokens(engine, repeated) > 16 * 4, 60)
    os.killpg(servers[0].pid, signal.SIGKILL)
    disturbed = await asyncio.gather(*asking)
    assert engine.load().moved["resumed"] >= 4
    assert not engine.load().moved.get("ended")
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert comparable(after) == comparable(before)
    await both_well(engine)


def _tokens(engine: Engine, asked: list[ChatRequest]) -> int:
    return sum(engine.pop_emitted_tokens(request.request_id) for request in asked)


async def test_a_form_that_a_foreign_server_cannot_take_up_ends(pair: Any) -> None:
    """Its own code for it, after what has come; what came is what was counted."""
    engine, servers = pair
    await both_well(engine)
    request = chat(regex="[0-9]{3000}", max_tokens=3000)
    asking = asyncio.create_task(ask(engine, request))
    await until(lambda: engine.pop_emitted_tokens(request.request_id) > 4, 60)
    (number,) = (n for n, server in enumerate(engine._pool.servers) if server.num_open)
    os.killpg(servers[number].pid, signal.SIGKILL)
    with pytest.raises(EngineFailed) as failed:
        await asking
    assert failed.value.code == "engine_restarted"


CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}


async def test_a_server_of_ours_takes_up_any_answer(remote_engine: Any) -> None:
    """Killed and started again, it goes on with grammars, tools and penalties: it runs our scheduler."""
    engine, child = remote_engine, remote_engine._child
    num_starts, moved = child.num_starts, dict(engine.load().moved)
    kinds: list[dict[str, Any]] = [
        {"regex": "[0-9]{300}"},
        {"frequency_penalty": 1.0, "ignore_eos": True},
        {"tools": [CLOCK], "tool_choice": "required"},
        {"n": 2, "ignore_eos": True},
        {"logprobs": True, "top_logprobs": 2, "ignore_eos": True},
    ]
    asked = [chat("漢字 What is a token ring?", temperature=0, max_tokens=300, **kind) for kind in kinds]
    undisturbed = await asyncio.gather(*(ask(engine, request) for request in asked))
    repeated = [again(request) for request in asked]
    asking = [asyncio.create_task(ask(engine, request)) for request in repeated]
    await until(lambda: _tokens(engine, repeated) > 60, 60)
    os.killpg(child.pid, signal.SIGKILL)
    disturbed = await asyncio.gather(*asking)
    assert child.num_starts == num_starts + 1
    assert engine.load().moved["resumed"] - moved.get("resumed", 0) >= 4
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert comparable(after) == comparable(before)
