"""The remote servers of one model: which of them takes the next request, and which are well.

A task per server polls its load once a second. Where nothing has come from it meanwhile, a failed poll counts
for its breaker; once that is open, what is still open on the server is cut off, and probes look whether it is
back, and still has the same model. Another task asks for its health, at once where none of its streams has
brought anything for a time: one that answers and does not generate is cut off too.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Collection, Sequence

from app.core import EngineLoad
from app.engine.remote.events import Refusal
from app.engine.remote.faults import FaultLog
from app.engine.remote.model import Facts
from app.engine.remote.server import HEALTH_TIMEOUT_S, RemoteServer, ServerGone

POLL_S = 1.0
HEALTH_S = 15.0
STALL_S = 60.0
WAITED_PROBE_S = 2.0
"""Seconds between probes, at most, while choices wait for a server; a probe generates a token."""
NOT_FOUND = 404


class ServerPool:
    """The servers, in the order in which they were named. `on_hung` is told of each that was cut off."""

    def __init__(
        self,
        servers: Sequence[RemoteServer],
        *,
        poll_s: float = POLL_S,
        stall_s: float = STALL_S,
        faults: FaultLog | None = None,
        on_hung: Callable[[], None] = lambda: None,
    ) -> None:
        self.servers = servers
        self.faults = faults or FaultLog()
        self._poll_s = poll_s
        self._stall_s = stall_s
        self._on_hung = on_hung
        self._came_back = asyncio.Event()
        self._num_waiting = 0
        self._identity: tuple[str, ...] = ()
        self._watching: list[asyncio.Task[None]] = []

    def pick(self, tried: Collection[RemoteServer] = ()) -> RemoteServer | None:
        """The server with the fewest of our streams among those that are well and not `tried`."""
        well = [s for s in self.servers if not s.breaker.is_open and s not in tried]
        return min(well, key=lambda server: server.num_open, default=None)

    async def wait_for_server(self) -> None:
        """Wait until a server takes requests."""
        self._num_waiting += 1
        try:
            while not self.is_well:
                self._came_back.clear()
                await self._came_back.wait()
        finally:
            self._num_waiting -= 1

    @property
    def is_well(self) -> bool:
        """Whether any server takes requests."""
        return any(not server.breaker.is_open for server in self.servers)

    @property
    def load(self) -> EngineLoad | None:
        """The sum of what the servers last said; None where none says."""
        loads = [s.load for s in self.servers if s.load is not None and not s.breaker.is_open]
        if not loads:
            return None
        return EngineLoad(
            num_running_reqs=sum(load.num_running_reqs for load in loads),
            num_queue_reqs=sum(load.num_queue_reqs for load in loads),
            used_tokens=sum(load.used_tokens for load in loads),
            max_total_tokens=sum(load.max_total_tokens for load in loads),
            gen_throughput_tokens_per_s=sum(load.gen_throughput_tokens_per_s for load in loads),
            max_running_reqs=sum(load.max_running_reqs for load in loads),
        )

    def watch(self, facts: Facts) -> None:
        """Begin to poll; servers are expected to have the model of `facts`."""
        self._identity = facts.identity
        self._watching = [
            asyncio.create_task(watch(server), name=f"watch {server.url}")
            for server in self.servers
            for watch in (self._watch_load, self._watch_health)
        ]

    async def aclose(self) -> None:
        """Stop polling."""
        for task in self._watching:
            task.cancel()
        await asyncio.gather(*self._watching, return_exceptions=True)
        self._watching = []

    async def _watch_load(self, server: RemoteServer) -> None:
        """Poll it while it is well, probe it while it is not."""
        loop = asyncio.get_running_loop()
        polls, probed_s = True, 0.0
        while True:
            if server.breaker.is_open:
                wanted_s = probed_s + WAITED_PROBE_S if self._num_waiting else math.inf
                if loop.time() >= min(server.breaker.next_probe_s, wanted_s):
                    await self._probe(server)
                    probed_s = loop.time()
            elif polls:
                polls = await self._poll(server)
            await asyncio.sleep(self._poll_s)

    async def _watch_health(self, server: RemoteServer) -> None:
        """Ask for its health now and then, and where its streams are silent; polls go on meanwhile."""
        loop = asyncio.get_running_loop()
        next_s = loop.time() + HEALTH_S
        while True:
            if not server.breaker.is_open and (loop.time() >= next_s or self._is_silent(server)):
                next_s = loop.time() + HEALTH_S
                await self._check_health(server)
            await asyncio.sleep(self._poll_s)

    async def _poll(self, server: RemoteServer) -> bool:
        """Read its load; False where the server has none to read: a router, or an older SGLang."""
        began_s = asyncio.get_running_loop().time()
        try:
            await server.poll()
        except Refusal as refused:
            return refused.status != NOT_FOUND
        except ServerGone:
            self._missed(server, began_s)
        else:
            server.breaker.succeeded()
        return True

    async def _check_health(self, server: RemoteServer) -> None:
        """Ask whether it generates. One that says no gets nothing new; what still advances there may end."""
        began_s = asyncio.get_running_loop().time()
        try:
            await server.get("/health", HEALTH_TIMEOUT_S)
        except Refusal as refused:
            if refused.status != NOT_FOUND:
                self._found_ill(server)
                return
        except ServerGone:
            if self._is_silent(server):
                self._found_ill(server)
            else:
                self._missed(server, began_s)
            return
        server.hear_stream()  # it generates, or nothing here tells whether it does: each stream has its time

    def _found_ill(self, server: RemoteServer) -> None:
        if not server.breaker.is_open:
            server.breaker.trip(asyncio.get_running_loop().time())
            self._cut_if_silent(server)

    def _is_silent(self, server: RemoteServer) -> bool:
        return server.silent_s(asyncio.get_running_loop().time()) >= self._stall_s

    def _cut_if_silent(self, server: RemoteServer) -> None:
        if self._is_silent(server):
            self._cut(server)

    def _cut(self, server: RemoteServer) -> None:
        self.faults.fault("stalled", server.url)
        server.cut()
        self._on_hung()

    def _missed(self, server: RemoteServer, began_s: float) -> None:
        if server.heard_since(began_s):
            return
        was_open = server.breaker.is_open
        server.breaker.failed(asyncio.get_running_loop().time())
        if server.breaker.is_open and not was_open:
            self._cut(server)

    async def _probe(self, server: RemoteServer) -> None:
        if await self._is_back(server):
            server.breaker.close()
            self._came_back.set()
        else:
            server.breaker.failed(asyncio.get_running_loop().time())
            self._cut_if_silent(server)

    async def _is_back(self, server: RemoteServer) -> bool:
        try:
            same = (await describe(server)).identity == self._identity
            await server.get("/health", HEALTH_TIMEOUT_S)
        except (Refusal, ServerGone):
            return False
        return same


async def describe(server: RemoteServer) -> Facts:
    """The facts that a server reports, under the newer or the older names.

    Raises ServerGone, and Refusal, of which 404 says that it is no SGLang.
    """
    return Facts(
        await _either(server, "/model_info", "/get_model_info"),
        await _either(server, "/server_info", "/get_server_info"),
    )


async def _either(server: RemoteServer, path: str, older_path: str) -> dict[str, object]:
    try:
        document = await server.get(path)
    except Refusal as refused:
        if refused.status != NOT_FOUND:
            raise
        document = await server.get(older_path)
    if not isinstance(document, dict):
        raise ServerGone(f"{path} is no JSON object", "unreadable")
    return document
