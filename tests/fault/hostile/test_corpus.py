"""Every request that hurt once: the server answers it as it should, and others do not notice (README.md)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.hostile_corpus import REQUESTS, Case, cases, run
from tests.support.servers import ServerProcess, chat, start_process
from tests.support.sse_client import fetch

AFTERWARDS_S = 30.0
"""For a plain answer once the case is over; the engine may be working off what it took."""


def named(engine: str) -> pytest.MarkDecorator:
    """A test for each case of an engine."""
    return pytest.mark.parametrize("case", cases(engine), ids=lambda case: case.name)


async def check(case: Case, server: ServerProcess, model: str) -> None:
    """Run the case, and see that the server is well afterwards."""
    port = await server.ready(timeout_s=200)
    lines = len(server.log)
    seen = await run(case, port, server.process.pid)
    key = {"authorization": "Bearer secret"} if case.api_key else {}
    body = chat(model=model, stream=False, max_tokens=2)
    async with asyncio.timeout(AFTERWARDS_S):
        answer = await fetch(port, "POST", "/v1/chat/completions", body, key)
    if answer.status != 200:
        seen.faults.append(f"afterwards a plain request is {answer.status}")
    if case.log_lines is not None and len(server.log) - lines > case.log_lines:
        seen.faults.append(f"{len(server.log) - lines} log lines")
    if "Traceback" in "".join(server.noise) or any("exception" in line for line in server.log):
        seen.faults.append("a traceback in the log")
    assert not seen.faults, case.why


@pytest.fixture(scope="module")
async def scripted_servers(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: Any
) -> AsyncIterator[dict[bool, ServerProcess]]:
    """A server without a key and one with: for all cases, as an attacker has one server too."""
    flags = ("--engine", "scripted", "--scripted", "tokens=20,rate=2000", "--safety", "off")
    servers = {
        has_key: await start_process(
            tmp_path_factory.mktemp("corpus"), *flags, **({"TOKENRING_API_KEY": "secret"} if has_key else {})
        )
        for has_key in (False, True)
    }
    yield servers
    for server in servers.values():
        await server.close()


@named("scripted")
async def test_request_of_the_corpus(scripted_servers: dict[bool, ServerProcess], case: Case):
    """All that the case says holds, after all the cases before it."""
    await check(case, scripted_servers[case.api_key], "scripted")


@pytest.mark.sglang
@pytest.mark.timeout(400)
@named("sglang")
async def test_request_of_the_corpus_to_sglang(sglang_server: ServerProcess, case: Case):
    """All that the case says holds with the real engine, which goes on."""
    await check(case, sglang_server, "tokenring-builtin")


def test_every_file_is_a_case():
    """Each file says why it is here, what is sent, and what may come back."""
    known = {path.stem for path in REQUESTS.glob("*.json")}
    assert {case.name for engine in ("scripted", "sglang") for case in cases(engine)} == known
    for case in (*cases("scripted"), *cases("sglang")):
        assert case.why
        assert all(step["allowed"] for step in case.steps), case.name
