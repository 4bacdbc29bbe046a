"""How late a server answers `/healthz` while it has something else to do, other programs' time apart."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from tests.support.clocks import unhindered_s
from tests.support.servers import ServerProcess
from tests.support.sse_client import Connection

EVERY_S = 0.02


class Lateness:
    """The longest that `/healthz` took."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self.answers = 0


@contextlib.asynccontextmanager
async def lateness(server: ServerProcess) -> AsyncIterator[Lateness]:
    """Ask `/healthz` all the time, on a connection of its own, while the block runs."""
    measured = Lateness()
    asking = asyncio.create_task(_ask(server, measured))
    try:
        yield measured
    finally:
        # The answer that is awaited now tells how late it is.
        await asyncio.sleep(EVERY_S)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking


async def _ask(server: ServerProcess, measured: Lateness) -> None:
    pid = server.process.pid
    async with await Connection.to(await server.port()) as connection:
        while True:
            began_s = unhindered_s(pid)
            try:
                await connection.request("GET", "/healthz")
                assert (await connection.response()).status == 200
            finally:
                measured.longest_s = max(measured.longest_s, unhindered_s(pid) - began_s)
            measured.answers += 1
            await asyncio.sleep(EVERY_S)
