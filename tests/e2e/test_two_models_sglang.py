"""Two real SGLang models in one server, the built-in one under two names: `auto`, degraded mode, a death.

The large one has a small pool, so that one long answer fills it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support.servers import ROOT, ServerProcess, start_process
from tests.support.sse_client import Connection, Response, fetch, open_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

LARGE, SMALL = "tokenring-builtin", "pocket"
EASY, HARD = "Who wrote Faust?", "Prove this theorem, then write a Python function for it."
POOL = 4096
CONFIG = f"""
[engine.sglang]
max_total_tokens = {POOL}
[engine.small]
max_total_tokens = 8192
"""
FLAGS = (
    *("--small-model", str(ROOT / "app/engine/builtin"), "--small-served-model-name", SMALL),
    *("--safety", "off", "--queue-standard-s", "120", "--ttft-target-s", "100"),
    *("--degrade-rise-s", "0.5", "--degrade-fall-s", "0.7", "--degrade-short-tokens", "5"),
)


class Node:
    """The server and its two models."""

    def __init__(self, process: ServerProcess, port: int) -> None:
        self.process = process
        self.port = port

    async def ask(self, content: str = EASY, model: str = LARGE, **headers: str) -> Response:
        """A question, answered in one piece, in 40 tokens at most."""
        body = {**said(content, model), "max_tokens": 40}
        return await fetch(self.port, "POST", "/v1/chat/completions", body, named(headers))

    async def ready(self) -> dict[str, Any]:
        """What `/readyz` says, which is that requests are served."""
        answer = await fetch(self.port, "GET", "/readyz")
        assert answer.status == 200
        return answer.json()

    async def step(self, *steps: str) -> None:
        """Wait until degraded mode is at one of these steps."""
        async with asyncio.timeout(60):
            while (await self.ready())["degraded"]["step"] not in steps:
                await asyncio.sleep(0.02)

    async def small(self, state: str) -> None:
        """Wait until the small model's state begins so."""
        async with asyncio.timeout(120):
            while not (await self.ready())["small_model"]["state"].startswith(state):
                await asyncio.sleep(0.05)


def said(content: str, model: str) -> dict[str, Any]:
    """The body of a question."""
    return {"model": model, "messages": [{"role": "user", "content": content}], "temperature": 0}


def named(headers: dict[str, str]) -> dict[str, str]:
    """Headers by their names."""
    return {name.replace("_", "-"): value for name, value in headers.items()}


@pytest.fixture(scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory, anyio_backend: Any) -> AsyncIterator[Node]:
    """Both models there; started once for all tests here, the last of which stops it."""
    folder: Path = tmp_path_factory.mktemp("two")
    (folder / "tokenring.toml").write_text(CONFIG)
    process = await start_process(folder, *FLAGS)
    try:
        started = Node(process, await process.ready(timeout_s=200))
        await started.small("ready")
        yield started
    finally:
        await process.close()


async def test_auto_goes_to_either(node: Node) -> None:
    """By what is asked; each answers under its name, and the answer says which and why."""
    for content, model, reason in ((EASY, SMALL, "small; simple"), (HARD, LARGE, "large; math")):
        answer = await node.ask(content, "auto")
        assert answer.status == 200, answer.json()
        assert answer.json()["model"] == answer.headers["x-served-model"] == model
        assert answer.headers["x-route-reason"].startswith(reason)
        assert answer.json()["usage"]["completion_tokens"] > 5
        assert (await node.ask(content, model)).json()["choices"] == answer.json()["choices"]


async def test_short_then_small_then_refused_and_back(node: Node) -> None:
    """One long answer fills the large model, another waits: step by step less is done, and more again."""
    long = {**said("Count.", LARGE), "ignore_eos": True, "stream": True}
    full = await open_stream(node.port, {**long, "max_tokens": POOL - 200})
    waiting = await Connection.to(node.port)
    await waiting.request("POST", "/v1/chat/completions", {**long, "max_tokens": 1000})

    await node.step("short")
    short = await node.ask()
    assert (short.headers["x-degraded"], short.headers["x-served-model"]) == ("short-output", LARGE)
    assert short.json()["usage"]["completion_tokens"] == 5
    assert short.json()["choices"][0]["finish_reason"] == "length"

    await node.step("small", "refuse")  # each does what those before it do; the log says that all were taken
    small = await node.ask()
    assert small.headers["x-degraded"] == "short-output, small-model"
    assert small.json()["model"] == small.headers["x-served-model"] == SMALL
    assert small.json()["choices"][0]["message"] == short.json()["choices"][0]["message"]

    await node.step("refuse")
    large = {**said(EASY, LARGE), "max_tokens": POOL - 200, "ignore_eos": True}
    refused = await fetch(node.port, "POST", "/v1/chat/completions", large, {"x-no-degrade": "1"})
    assert refused.refusal()[:2] == (503, "overloaded")
    assert refused.headers["x-degraded"] == "refused"
    assert int(refused.headers["retry-after"]) >= 1

    waiting.close()
    await fetch(node.port, "POST", f"/api/chat/completions/{full.id}/cancel", {})
    await full.to_end()
    full.connection.close()
    await node.step("normal")
    again = await node.ask()
    assert (again.status, again.json()["model"], "x-degraded" in again.headers) == (200, LARGE, False)
    steps = [line["step"] for line in node.process.log if line.get("event") == "degraded"]
    assert steps == ["short", "small", "refuse", "small", "short", "normal"]


async def test_the_small_one_s_death_leaves_the_large_serving(node: Node) -> None:
    """It is known at once, and nothing else ends."""
    (child,) = [
        process
        for process in psutil.Process(node.process.process.pid).children()
        if "app.engine.sglang.child" in process.cmdline()
    ]
    os.kill(child.pid, signal.SIGKILL)
    await node.small("down")
    answer = await node.ask(EASY, "auto")
    assert (answer.json()["model"], answer.headers["x-route-reason"]) == (LARGE, "large; alone")
    assert (await node.ask(EASY, SMALL)).refusal()[:2] == (503, "engine_not_ready")


async def test_a_stop_reports_no_leaked_semaphore(node: Node) -> None:
    """After SIGTERM neither the server nor its child server's processes leave multiprocessing a warning."""
    await node.small("ready")
    told_before = len(node.process.noise)
    node.process.terminate()
    assert await node.process.exit_status(timeout_s=60) == 0
    told = node.process.noise[told_before:]
    assert [line for line in told if "resource_tracker" in line or "leaked" in line] == []
