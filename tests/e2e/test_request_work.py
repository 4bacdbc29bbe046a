"""The work of one request beside its tokens, counted: tasks, thread hops, transactions, statements.

A number that rises here is a cost that every request pays. It rises for a reason, or not at all.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.concurrency import owner_threads
from app.engine.scripted.engine import Script
from app.store import database
from tests.support.servers import Serve, Served, chat
from tests.support.sse_client import fetch

REQUESTS = 8
PASSED = "Please write a short polite letter that thanks our neighbours for the flowers in the garden."
"""A prompt that the n-grams let pass alone."""


class Work:
    """Counts of a server's work since `begin`."""

    def __init__(self, served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
        self.served = served
        self.counts: Counter[str] = Counter()
        self._last = ""
        run, job_run = database._run, owner_threads._Job.run

        async def counted_run(connection: Any, query: Any) -> Any:
            self.counts["thread hops"] += 1
            return await run(connection, query)

        def counted_job(job: Any) -> None:
            self.counts["thread hops"] += 1
            job_run(job)

        monkeypatch.setattr(database, "_run", counted_run)
        monkeypatch.setattr(owner_threads._Job, "run", counted_job)

    async def begin(self) -> None:
        """Count from now on."""
        writer = self.served.runtime.database._writer
        assert writer is not None
        connection = writer._conn
        await writer._execute(connection.set_trace_callback, self._statement)
        loop = asyncio.get_running_loop()
        loop.set_task_factory(self._task)
        self.counts.clear()

    def per_request(self) -> dict[str, float]:
        """The counts for each request."""
        asyncio.get_running_loop().set_task_factory(None)
        return {what: number / REQUESTS for what, number in self.counts.items()}

    def _statement(self, sql: str) -> None:
        if sql in (self._last, "BEGIN IMMEDIATE") or sql.startswith("--"):
            return  # a trigger's statements are shown as the one that has it, again
        self._last = sql
        self.counts["transactions" if sql == "COMMIT" else "statements"] += 1

    def _task(self, loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
        if "/app/" in coro.cr_code.co_filename or coro.__qualname__.endswith("run_asgi"):
            self.counts["tasks"] += 1
        return asyncio.Task(coro, loop=loop, **options)


async def ask(served: Served, path: str) -> None:
    """One request after the other, each with a prompt of its own."""
    for number in range(REQUESTS):
        body = chat(f"{PASSED} The {number + 2} roses are white.", stream=True)
        response = await fetch(served.port, "POST", path, body)
        assert response.status == 200


@pytest.fixture
async def work(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Work]:
    """A server without clocks that would write on their own."""
    monkeypatch.setattr("app.journal.journal.CHECKPOINT_S", 60.0)
    monkeypatch.setattr("app.safety.session.recorder.FLUSH_S", 60.0)
    monkeypatch.setattr("app.store.key_table.POLL_S", 60.0)
    work = Work(await serve(Script(tokens=2)), monkeypatch)
    for path in ("/v1/chat/completions", "/api/chat/completions"):  # the first make what later ones find
        await ask(work.served, path)
    yield work
    loop = asyncio.get_running_loop()
    loop.set_task_factory(None)


@pytest.mark.parametrize("safety", ["on"])
async def test_an_unstored_answer(work: Work):
    """Its generation and its connection are tasks; its reservation and its settlement are written apart."""
    await work.begin()
    await ask(work.served, "/v1/chat/completions")
    assert work.per_request() == {"tasks": 2, "thread hops": 2, "transactions": 2, "statements": 4}


@pytest.mark.parametrize("safety", ["on"])
async def test_a_stored_answer(work: Work):
    """The turn's messages are written with the reservation, the answer with the settlement."""
    await work.begin()
    await ask(work.served, "/api/chat/completions")
    assert work.per_request() == {"tasks": 2, "thread hops": 2, "transactions": 2, "statements": 9}
