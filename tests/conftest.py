"""Fixtures: real servers with the scripted engine, in the test's own loop or as a process."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import settings as hypothesis_settings

from app.core import Engine
from app.engine.scripted.engine import Script, ScriptedEngine
from app.runtime import ModelLoader
from app.settings import Settings
from tests.support.preloaded import Preloaded, importing
from tests.support.servers import MakeScript, Serve, Served, ServerProcess, Spawn, serve_here, start_process

# A failure prints the line that repeats it. How long an example takes says how busy the machine is.
hypothesis_settings.register_profile(
    "tokenring", print_blob=True, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
hypothesis_settings.load_profile("tokenring")


IMPORTING_S = 300
"""A test with SGLang may be the first, which imports it: 10 s on a quiet machine."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests with SGLang have longer than others."""
    for item in items:
        if item.get_closest_marker("sglang") and not item.get_closest_marker("timeout"):
            item.add_marker(pytest.mark.timeout(IMPORTING_S))


def pytest_collection_finish() -> None:
    """Leave what has been imported and collected out of later collections, which stop all threads for it."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def anyio_backend() -> tuple[str, dict[str, Any]]:
    """Tests run on the event loop that serves in production."""
    return "asyncio", {"use_uvloop": True}


@pytest.fixture
def safety() -> str:
    """Whether servers screen, where a test does not say: not where that is not the subject."""
    return "off"


@pytest.fixture
async def serve(tmp_path_factory: pytest.TempPathFactory, safety: str) -> AsyncIterator[Serve]:
    """Servers in the test's loop, by script and settings; they end with the test."""
    started: list[Served] = []

    async def start(
        script: MakeScript | None = None,
        *,
        send_buffer_bytes: int | None = None,
        engine_type: type[ScriptedEngine] = ScriptedEngine,
        load_models: ModelLoader | None = None,
        ready_engine: Engine | None = None,
        **settings: Any,
    ) -> Served:
        data_dir = settings.pop("data_dir", None) or tmp_path_factory.mktemp("data")
        in_force = Settings(port=0, data_dir=data_dir, **{"safety": safety, **settings})
        served = await serve_here(
            script or Script(), in_force, send_buffer_bytes, engine_type, load_models, ready_engine
        )
        started.append(served)
        return served

    yield start
    for served in started:
        await served.close()


@pytest.fixture
async def spawn(tmp_path: Path, safety: str) -> AsyncIterator[Spawn]:
    """Server processes with the scripted engine, by script and flags; they end with the test."""
    started: list[ServerProcess] = []

    async def start(script: str = "", *args: str, **env: str) -> ServerProcess:
        flags = ("--engine", "scripted", "--scripted", script, "--safety", safety, *args)
        process = await start_process(tmp_path, *flags, **env)
        started.append(process)
        return process

    yield start
    for process in started:
        await process.close()


@pytest.fixture(scope="session")
def preloaded() -> Iterator[Preloaded | None]:
    """A process with SGLang imported, from which others are forked; none beside a GPU."""
    with importing() as forking:
        yield forking


@pytest.fixture(scope="session")
async def sglang_server(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: Any
) -> AsyncIterator[ServerProcess]:
    """`serve` as a user starts it, once for all tests: real SGLang and the built-in model."""
    flags = ("--heartbeat-s", "0.1", "--resume-grace-s", "5")
    process = await start_process(tmp_path_factory.mktemp("sglang"), *flags)
    try:
        await process.ready(timeout_s=200)
        yield process
        process.terminate()
        assert await process.exit_status(timeout_s=60) == 0
    finally:
        await process.close()
