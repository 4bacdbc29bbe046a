"""False SGLang servers, and engines in front of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from app.engine.http.engine import RemoteEngine
from app.engine.http.pool import RemoteOptions
from app.engine.http.server import Timeouts
from tests.support.false_sglang import FalseServer, PlainModel


@pytest.fixture
async def servers() -> AsyncIterator[list[FalseServer]]:
    """Two of them."""
    started = [await FalseServer().start() for _ in range(2)]
    yield started
    for server in started:
        await server.stop()


@pytest.fixture
async def connect() -> AsyncIterator[Callable[..., Awaitable[RemoteEngine]]]:
    """Engines over servers, closed with the test."""
    engines: list[RemoteEngine] = []

    async def start(
        *servers: FalseServer, model: type[PlainModel] = PlainModel, resume_s: float = 20.0, **timeouts: float
    ) -> RemoteEngine:
        stall_s = timeouts.pop("stall_s", 0.3)
        limits = Timeouts(**({"connect_s": 10.0, "headers_s": 10.0, "silence_s": 10.0} | timeouts))
        urls = [server.url for server in servers]
        options = RemoteOptions(
            urls,
            api_key="secret",
            start_s=10,
            timeouts=limits,
            poll_s=0.02,
            resume_s=resume_s,
            stall_s=stall_s,
        )
        engine = RemoteEngine(options, model)
        engines.append(engine)
        await engine.start()
        async with asyncio.timeout(20):
            while any(server.breaker.is_open for server in engine._pool.servers):
                await asyncio.sleep(0.01)
        return engine

    yield start
    for engine in engines:
        await engine.aclose()
