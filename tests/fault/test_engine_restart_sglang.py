"""Real SGLang loses a process under live streams: over HTTP there is a pause, and nothing else."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import sqlite3
from collections.abc import AsyncIterator
from contextlib import closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from playwright.async_api import Route, async_playwright, expect

from app.store.database import FILE_NAME
from tests.support.preloaded import Preloaded, named
from tests.support.servers import ServerProcess, chat, start_process
from tests.support.sse_client import Response, Stream, Transcript, fetch, open_stream

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(600)]

FLAGS = (
    "--engine-restarts",
    "9",
    "--engine-hang-s",
    "5",
    "--heartbeat-s",
    "0.2",
    "--data-dir",
    "data",
)
CHROMIUM = shutil.which("chromium")
TOKENS = 600
"""Some seconds of one stream, so that a process is lost within it."""
STREAMS = 4
RETURN_S = 200.0


@pytest.fixture(scope="module")
async def server(
    tmp_path_factory: pytest.TempPathFactory, anyio_backend: Any, preloaded: Preloaded | None
) -> AsyncIterator[ServerProcess]:
    """One server for all losses of this module: what one leaves behind would hurt the next."""
    process = await start_process(tmp_path_factory.mktemp("restarts"), *FLAGS, preloaded=preloaded)
    try:
        await process.ready(timeout_s=200)
        yield process
        process.terminate()
        assert await process.exit_status(timeout_s=60) == 0
    finally:
        await process.close()


def body(number: int, **parameters: Any) -> dict[str, Any]:
    """A greedy request that runs to its length."""
    parameters = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True, **parameters}
    usage = {"stream_options": {"include_usage": True}}
    return chat(f"Tell me about ring {number}.", model="tokenring-builtin", **usage, **parameters)


async def undisturbed(port: int, bodies: list[dict[str, Any]]) -> list[Transcript]:
    """What the clients hear while nothing is lost."""
    return await to_ends([await open_stream(port, request) for request in bodies])


async def to_ends(streams: list[Stream]) -> list[Transcript]:
    """Read all streams to their ends."""
    try:
        return list(await asyncio.gather(*(stream.to_end() for stream in streams)))
    finally:
        for stream in streams:
            stream.connection.close()


def lose(process: ServerProcess, name: str, signum: signal.Signals) -> None:
    """Send a signal to the engine's process of that kind."""
    os.kill(named(name, process.process.pid)[0].pid, signum)


async def readiness(port: int, status: int) -> Response:
    """Wait until /readyz has that status."""
    async with asyncio.timeout(RETURN_S):
        while (response := await fetch(port, "GET", "/readyz")).status != status:
            await asyncio.sleep(0.01)
    return response


def check_same(heard: list[Transcript], expected: list[Transcript]) -> None:
    """Texts, ends and counts are the undisturbed ones."""
    for transcript, reference in zip(heard, expected, strict=True):
        assert transcript.errors == []
        assert transcript.done
        assert transcript.text == reference.text
        assert transcript.finish_reasons == reference.finish_reasons
        assert transcript.usage is not None
        assert reference.usage is not None
        assert transcript.usage["completion_tokens"] == reference.usage["completion_tokens"]


def rows(process: ServerProcess) -> dict[str, tuple[Any, ...]]:
    """The ledger's requests by id."""
    query = "SELECT id, state, prompt_tokens, completion_tokens - withheld_tokens, outcome FROM requests"
    directory = Path(f"/proc/{process.process.pid}/cwd")
    with closing(sqlite3.connect(directory / "data" / FILE_NAME)) as connection:
        found = connection.execute(query).fetchall()
    assert len({row[0] for row in found}) == len(found)
    return {row[0]: row[1:] for row in found}


async def test_streams_go_on_when_a_process_stands_still(server: ServerProcess) -> None:
    """Over HTTP there is a pause: for clients that stay, that come back, and one that stops its answer.

    Texts are the undisturbed ones, and the ledger has each request once. tests/contract/test_sglang_life.py
    has the other losses, without HTTP.
    """
    port = await server.port()
    bodies = [*(body(number) for number in range(STREAMS)), body(0, n=2), body(1)]
    expected = await undisturbed(port, bodies)
    streams: list[Stream] = [await open_stream(port, request) for request in [*bodies, body(2)]]
    for stream in streams:
        await stream.read_events(40)
    lose(server, "detokenizer", signal.SIGSTOP)
    away = await readiness(port, 503)
    assert away.json()["phase"].startswith("restarting: ")
    assert int(away.headers["retry-after"]) >= 1
    assert (await fetch(port, "GET", "/healthz")).status == 200
    refused = await fetch(port, "POST", "/api/chat/completions", body(9))
    assert refused.refusal() == (503, "engine_not_ready", None)
    assert int(refused.headers["retry-after"]) >= 1
    stopped = streams.pop()
    await fetch(port, "DELETE", f"/api/chat/completions/{stopped.id}")
    [last] = await to_ends([stopped])
    assert last.finish_reasons == {0: "stop"}
    assert (await fetch(port, "GET", "/readyz")).status == 503
    staying, returned = streams[:STREAMS], []
    for stream in streams[STREAMS:]:
        stream.connection.reset()
        again = await open_stream(port, stream_id=stream.id, after=stream.transcript.last_id)
        again.transcript = stream.transcript
        returned.append(again)
    heard = await to_ends([*staying, *returned])
    check_same(heard, expected)
    await readiness(port, 200)
    assert sum(stream.parser.comments for stream in staying) > 0  # heartbeats in the pause
    ledger = rows(server)
    for transcript in heard[:STREAMS]:
        assert transcript.usage is not None
        counts = transcript.usage["prompt_tokens"], transcript.usage["completion_tokens"]
        assert ledger[transcript.stream_id or ""] == ("settled", *counts, "length")
    assert ledger[stopped.id][0] == "settled"


async def long_answer(route: Route) -> None:
    """A question of the console. Its answer lasts, and no screen halts it: a test above has it whole."""
    lasting = {"temperature": 0, "max_tokens": TOKENS, "ignore_eos": True}
    question = json.loads(route.request.post_data or "")
    await route.continue_(post_data=json.dumps(question | lasting))


@pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (scripts/setup --dev)")
async def test_the_console_waits_for_the_engine(server: ServerProcess) -> None:
    """The page says what the server does meanwhile, and draws the rest in the same answer."""
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        page = await browser.new_page()
        await page.route("**/api/chat/completions", long_answer)
        port = await server.port()
        await page.goto(f"http://127.0.0.1:{port}/")
        field = page.get_by_label("Message", exact=True)
        await field.fill("Tell me about ring 0.")
        await field.press("Enter")
        await expect(page.locator(".md")).to_contain_text(re.compile(r"\w \w"), timeout=30_000)
        lose(server, "scheduler", signal.SIGKILL)
        away = await readiness(port, 503)
        assert away.json()["phase"].startswith("restarting: ")
        # A forked engine may be back before the page has missed an event, so it is made to look now.
        await page.evaluate("window.dispatchEvent(new Event('online'))")
        await expect(page.locator(".banner")).to_have_text("The engine is restarting.")
        before = await page.locator(".md").inner_text()
        await expect(page.locator(".answer .facts")).to_contain_text(f"{TOKENS} out", timeout=RETURN_S * 1000)
        assert len(await page.locator(".md").inner_text()) > len(before)
        await expect(page.locator(".ending")).to_contain_text("token limit")
        await browser.close()


async def test_the_metrics_and_the_log_tell_of_it(server: ServerProcess) -> None:
    """What an operator learns afterwards; the loss of the test above is in it."""
    text = (await fetch(await server.port(), "GET", "/metrics")).body.decode()
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if line.startswith("tokenring_"))
    num_restarts = float(values["tokenring_restarts_total"])
    assert num_restarts >= 1
    assert float(values["tokenring_choices_resumed_total"]) >= num_restarts
    assert float(values["tokenring_choices_lost_total"]) == 0
    assert float(values["tokenring_last_outage_seconds"]) > 0
    lost, back = await server.logged("engine_lost"), await server.logged("engine_restarted")
    assert lost["cause"] in {"exited", "hung"}
    assert back["took_s"] > 0


async def test_a_first_start_that_stands_still_ends_the_server(
    tmp_path: Path, preloaded: Preloaded | None
) -> None:
    """Whoever started the server learns it by the status, and may start it again."""
    process = await start_process(
        tmp_path, *FLAGS, "--engine-restarts", "0", "--engine-start-s", "25", preloaded=preloaded
    )
    try:
        async with asyncio.timeout(RETURN_S):
            while (scheduler := scheduler_of(process)) is None:
                await asyncio.sleep(0.01)
        scheduler.suspend()
        assert await process.exit_status(timeout_s=60) == 3
        failed = await process.logged("engine_start_failed")
        assert "the start hangs: it has taken 25 s" in failed["reason"]
        assert not scheduler.is_running()
    finally:
        await process.close()


def scheduler_of(process: ServerProcess) -> psutil.Process | None:
    """The scheduler, once there is one."""
    return next(iter(named("scheduler", process.process.pid)), None)
