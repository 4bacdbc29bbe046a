"""Engines that are started once for all tests, in the loop that all tests run on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from app.core import Engine
from app.engine import child_server
from app.engine.scripted.engine import Script, ScriptedEngine
from tests.support.engines import engine_args
from tests.support.preloaded import ForkingAsyncio, Preloaded

GPU_SWITCHES = {"disable_overlap_schedule": False, "chunked_prefill_size": 64}
"""What SGLang does by default on a GPU, with chunks that prompts of the tests are longer than."""
START_LIMIT_S = 240
"""Below pytest's own limit, whose signal would break the loop of all tests."""


@asynccontextmanager
async def running(engine: Engine) -> AsyncIterator[Engine]:
    """Start it, lend it, close it, whether or not it came up."""
    try:
        async with asyncio.timeout(START_LIMIT_S):
            await engine.start()
        yield engine
    finally:
        await engine.aclose()


@pytest.fixture(scope="session")
def spawning(preloaded: Preloaded | None) -> None:
    """SGLang's processes have imported it when they begin: an engine's children, and servers beside it."""
    if preloaded is not None:
        preloaded.spawn_here()
        vars(child_server)["asyncio"] = ForkingAsyncio(preloaded)


@pytest.fixture(scope="session")
async def sglang_engine(anyio_backend: Any, spawning: None) -> AsyncIterator[Engine]:
    """Real SGLang with the built-in model, on a GPU where there is one."""
    from app.engine.sglang.args import SGLangOptions
    from app.engine.sglang.engine import SGLangEngine

    engine = SGLangEngine(SGLangOptions(server_args=engine_args(random_seed=7)))
    async with running(engine) as started:
        yield started


@pytest.fixture(scope="session")
async def overlap_engine(anyio_backend: Any, spawning: None) -> AsyncIterator[Engine]:
    """Real SGLang on the CPU, with the switches of its scheduler that a GPU has."""
    from app.engine.sglang.args import SGLangOptions
    from app.engine.sglang.engine import SGLangEngine

    engine = SGLangEngine(SGLangOptions(server_args=engine_args(random_seed=7, **GPU_SWITCHES)))
    async with running(engine) as started:
        yield started


@pytest.fixture(scope="session")
async def remote_engine(anyio_backend: Any, spawning: None) -> AsyncIterator[Engine]:
    """SGLang's own server, as a child process, with the built-in model."""
    from app.engine.sglang.args import SGLangOptions
    from app.engine_factory import child_engine
    from app.settings import Settings

    engine = child_engine(SGLangOptions(server_args=engine_args(random_seed=7)), print, Settings())
    async with running(engine) as started:
        yield started


@pytest.fixture(scope="session")
async def scripted_engine(anyio_backend: Any) -> AsyncIterator[Engine]:
    """The engine without a model."""
    engine = ScriptedEngine(Script(rate=2000, tokens=3000, context=8192))
    async with running(engine) as started:
        yield started


@pytest.fixture(
    params=[
        pytest.param("scripted"),
        pytest.param("sglang", marks=[pytest.mark.sglang, pytest.mark.timeout(300)]),
        pytest.param("overlap", marks=[pytest.mark.sglang, pytest.mark.timeout(300)]),
        pytest.param("remote", marks=[pytest.mark.sglang, pytest.mark.timeout(300)]),
    ]
)
def engine(request: pytest.FixtureRequest) -> Engine:
    """Each engine in turn."""
    started: Engine = request.getfixturevalue(f"{request.param}_engine")
    return started
