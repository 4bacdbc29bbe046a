"""OpenAI's SDKs, each started once for all tests, and a server with real SGLang."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from sdks import Sdk, command_of
from servers import ServerProcess, start_process


@pytest.fixture(scope="session", params=["pinned", "newest", "node"])
def sdk(request: pytest.FixtureRequest) -> Iterator[Sdk]:
    """Each SDK in turn."""
    started = Sdk(command_of(request.param))
    yield started
    started.close()


@pytest.fixture(scope="session")
def node() -> Iterator[Sdk]:
    """The Node SDK alone."""
    started = Sdk(command_of("node"))
    yield started
    started.close()


@pytest.fixture(scope="session")
async def sglang_server(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: Any
) -> AsyncIterator[ServerProcess]:
    """`serve` as a user starts it: real SGLang, the built-in model, heartbeats at 100 ms."""
    process = await start_process(tmp_path_factory.mktemp("sglang"), "--heartbeat-s", "0.1")
    await process.ready(timeout_s=280)
    yield process
    process.terminate()
    assert await process.exit_status(timeout_s=60) == 0
