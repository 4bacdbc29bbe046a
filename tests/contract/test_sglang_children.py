"""SGLang's own servers as children of the process that has an engine of its own: read, lost, found again."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.core import Engine
from app.engine.child_server import ChildCommand, ChildServer
from app.engine.http.engine import RemoteEngine
from app.engine.http.pool import RemoteOptions
from app.engine.sglang.args import SGLangOptions
from app.engine.sglang.child import child_command
from app.engine.sglang.platform import prepare_process
from app.engine_factory import build_guard_engine
from app.safety.categories import CATEGORIES
from app.safety.guard.templates import FORMATS
from app.safety.guard.tier import Guard
from app.settings import Settings
from scripts.benchmarks.bare_server import bare_server_command
from tests.support import tiny_guard
from tests.support.engines import Answer, ask, chat

pytestmark = [
    pytest.mark.sglang,
    pytest.mark.usefixtures("spawning"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),
]

CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
CUMULATIVE = {"incremental_streaming_output": False}
"""SGLang's default: each event tells everything so far."""


def processes() -> set[int]:
    """SGLang's processes under this one."""
    return {p.pid for p in psutil.Process().children(recursive=True) if "sglang" in p.name()}


def bare_server(port: int) -> ChildCommand:
    """SGLang as anybody may have started it."""
    *argv, arguments = bare_server_command(SGLangOptions(), port)
    return ChildCommand([*argv, json.dumps(json.loads(arguments) | CUMULATIVE)])


async def read_all(engine: Engine) -> str:
    """What an answer reads as, after one of each kind was read to the token."""
    plain = await ask(engine, chat(temperature=0, max_tokens=20, ignore_eos=True))
    scored = await ask(
        engine, chat(temperature=0, max_tokens=6, logprobs=True, top_logprobs=2, ignore_eos=True)
    )
    assert [len(answer.token_ids()) for answer in (plain, scored)] == [20, 6]
    assert [answer.counts().completion_tokens for answer in (plain, scored)] == [20, 6]
    assert scored.token_ids() == plain.token_ids()[:6]
    assert len(scored.logprobs()) == 6
    assert all(entry["top_logprobs"][0]["token"] == entry["token"] for entry in scored.logprobs())
    formed = await ask(engine, chat(regex="[0-9]{3}-[a-f]{4}", max_tokens=32))
    assert re.fullmatch("[0-9]{3}-[a-f]{4}", formed.text())
    called = await ask(engine, chat(tools=[CLOCK], tool_choice="required", max_tokens=200, temperature=0))
    assert next(delta.tool.name for delta in called.of() if delta.tool and delta.tool.name) == "clock"
    assert called.finish_reason() == "tool_calls"
    return plain.text()


async def lose(engine: Engine, child: ChildServer) -> None:
    """Kill the server in mid-answer: the answer goes on when it is back, as if nothing had happened."""
    asked = {"temperature": 0, "max_tokens": 300, "ignore_eos": True}
    undisturbed = await ask(engine, chat(**asked))
    request = chat(**asked)
    prompt, deltas = await engine.render(request), []
    async for delta in engine.generate(request.request_id, prompt):
        deltas.append(delta)
        if len(deltas) > 20 and child.num_starts == 1 and child.pid:
            os.killpg(child.pid, signal.SIGKILL)
    answer = Answer(prompt, deltas)
    assert answer.token_ids() == undisturbed.token_ids()
    assert answer.text() == undisturbed.text()
    assert answer.counts()._replace(cached_tokens=0) == undisturbed.counts()._replace(cached_tokens=0)
    assert engine.pop_emitted_tokens(request.request_id) == 300
    assert engine.load().moved["resumed"] == 1


async def test_a_remote_server_is_read_lost_and_found_again() -> None:
    """A bare SGLang that streams its default way is read to the token; killed, it is an error, then back."""
    from app.engine.sglang.remote import RemoteModelOptions, load_remote_model

    prepare_process()
    before = processes()
    child = ChildServer(bare_server)
    engine = RemoteEngine(
        RemoteOptions(start_s=200), lambda facts: load_remote_model(facts, RemoteModelOptions()), child
    )
    try:
        await engine.start()
        text = await read_all(engine)
        assert text
        async with asyncio.timeout(250):
            await lose(engine, child)
        assert await read_all(engine) == text
        assert child.num_starts == 2
    finally:
        await engine.aclose()
    assert processes() <= before


async def test_a_guard_in_a_child_beside_the_model_of_this_process(
    sglang_engine: Engine, tmp_path: Path
) -> None:
    """Both are rendered for in one process, and neither changes what the other says."""
    before = processes()
    form = FORMATS[0]
    model = tiny_guard.build(tmp_path / form.name, form)
    guarding = build_guard_engine(Settings(data_dir=tmp_path, safety_guard_model=str(model)), print)
    assert guarding is not None
    guard = Guard(guarding, form, timeout_s=60)
    asked = [{"role": "user", "content": "May I ask?"}]

    async def answer() -> Any:
        return (await ask(sglang_engine, chat(temperature=0, max_tokens=12, ignore_eos=True))).text()

    texts = [await answer()]
    try:
        await guarding.start()
        scores, text = await asyncio.gather(guard.score(asked), answer())
        texts += [text]
    finally:
        await guard.aclose()
        await guarding.aclose()
    texts += [await answer()]
    assert set(scores) <= set(CATEGORIES)
    assert all(0 < p < 1 for p in scores.values())
    assert len(set(texts)) == 1
    assert texts[0]
    assert processes() == before


async def test_a_child_that_cannot_listen_ends_and_says_why() -> None:
    """SGLang's server would wait for its scheduler for ever: nobody would learn that it serves nothing."""
    deaths: asyncio.Queue[str] = asyncio.Queue()
    before = processes()
    with socket.create_server(("127.0.0.1", 0)) as other:
        taken = other.getsockname()[1]
        child = ChildServer(
            lambda _port: child_command(SGLangOptions(), "a key", taken), on_exit=deaths.put_nowait
        )
        await child.start()
        assert "address already in use" in await deaths.get()
        await child.aclose()
    assert processes() == before
