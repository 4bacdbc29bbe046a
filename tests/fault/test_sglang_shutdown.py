"""The stop of a server with two real SGLang models, one of them in a child server."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.support.servers import ROOT, start_process
from tests.support.sse_client import fetch

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300)]

FLAGS = (
    "--small-model",
    str(ROOT / "app/engine/builtin"),
    "--small-served-model-name",
    "small",
    "--safety",
    "off",
)


async def test_a_stop_reports_no_leaked_semaphore(tmp_path: Path) -> None:
    """After SIGTERM neither the server nor its child server's processes leave multiprocessing a warning."""
    process = await start_process(tmp_path, *FLAGS)
    try:
        port = await process.ready(200)
        async with asyncio.timeout(200):
            while (await fetch(port, "GET", "/readyz")).json()["small_model"]["state"] != "ready":
                await asyncio.sleep(0.2)
        process.terminate()
        assert await process.exit_status(60) == 0
    finally:
        await process.close()
    assert [line for line in process.noise if "resource_tracker" in line or "leaked" in line] == []
