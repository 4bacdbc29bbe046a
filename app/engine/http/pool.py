"""The remote servers of one model: which of them takes the next request, and which are healthy.

A task per server polls its load once a second. Where nothing was received from it meanwhile, a failed poll
counts for its breaker; once that is open, what is still open on the server is cut off, and probes look
whether it is back, and still has the same model. Another task asks for its health, at once where its streams
have sent nothing for a time: a server that answers and does not generate is cut off too.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import structlog

from app.core import EngineLoad
from app.engine.http.events import Fault, Refusal, ServerGone
from app.engine.http.model import Facts
from app.engine.http.server import HEALTH_TIMEOUT_S, NOT_FOUND, RemoteServer, Timeouts, total_load

HEALTH_S = 15.0
MAX_CONTINUING = 4
"""Choices that another server reads at once. A request that kills servers takes at most so many with it."""
PLACE_S = 10.0
"""Seconds after which a choice without a token gives its place to the next."""

Moved = Literal["resumed", "ended"]


@dataclass(frozen=True, slots=True)
class RemoteOptions:
    """The servers' addresses. `start_s` is the seconds that `start()` waits for the first of them.

    `resume_s` is the seconds that a choice whose server was lost waits for one. After `stall_s` seconds
    without anything from any of its streams, a server's health is asked for. `continues_by_ids` says that the
    servers run our scheduler, which continues any answer by its ids.
    """

    urls: Sequence[str] = ()
    api_key: str = field(default="", repr=False)
    start_s: float = 60.0
    timeouts: Timeouts = field(default_factory=Timeouts)
    poll_s: float = 1.0
    resume_s: float = 300.0
    stall_s: float = 60.0
    continues_by_ids: bool = False


class FaultLog:
    """Faults of an engine's servers, and the choices that lost theirs: counted for the metrics, and logged.

    A line names the request and the server. It never quotes what was received.
    """

    def __init__(self) -> None:
        self._key = secrets.token_bytes(16)
        self.faults: Counter[str] = Counter(dict.fromkeys(get_args(Fault), 0))
        self.moved: Counter[str] = Counter(dict.fromkeys(get_args(Moved), 0))
        """Choices that lost their server: `resumed` by another or the same one, or `ended` with an error."""

    def fault(self, kind: Fault, server: str, rid: str = "") -> None:
        """Note what a server did to a request, or to all of its requests."""
        self.faults[kind] += 1
        structlog.get_logger().warning("remote_fault", kind=kind, server=server, request_id=rid)

    def resumed(self, server: str, rid: str, *, tokens: int, waited_s: float) -> None:
        """Note that a choice continues at a server."""
        self.moved["resumed"] += 1
        structlog.get_logger().info(
            "remote_resumed", server=server, request_id=rid, tokens=tokens, waited_s=round(waited_s, 2)
        )

    def ended(self, rid: str, why: str, prompt_ids: Sequence[int]) -> None:
        """Note that a choice could not continue. A keyed hash of its prompt tells its repetitions."""
        self.moved["ended"] += 1
        prompt = array("q", prompt_ids).tobytes()
        fingerprint = hashlib.blake2b(prompt, key=self._key, digest_size=8).hexdigest()
        structlog.get_logger().warning(
            "remote_request_lost", request_id=rid, why=why, fingerprint=fingerprint
        )


class ContinueGate:
    """A gate for choices that continue at another server: few at once, or the herd would end that one too."""

    def __init__(self, places: int = MAX_CONTINUING, place_s: float = PLACE_S) -> None:
        self._places = asyncio.Semaphore(places)
        self._place_s = place_s

    async def enter(self) -> Callable[[], None]:
        """Wait for a place; returns the function that gives it back, which may be called again."""
        await self._places.acquire()
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                timer.cancel()
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._place_s, leave)
        return leave


class ServerPool:
    """The servers, in the order in which they were named, and what the choices that they generate share.

    `on_hung` is called for each server that was cut off.
    """

    def __init__(self, options: RemoteOptions, *, on_hung: Callable[[], None]) -> None:
        self.servers: Sequence[RemoteServer] = ()
        self.faults = FaultLog()
        self.gate = ContinueGate()
        self.options = options
        self._on_hung = on_hung
        self._any_back = asyncio.Event()
        self._identity: tuple[str, ...] = ()
        self._watching: list[asyncio.Task[None]] = []

    def connect(self, servers: Sequence[RemoteServer]) -> None:
        """Use these servers from now on."""
        self.servers = servers

    def pick(self, tried: Collection[RemoteServer] = ()) -> RemoteServer | None:
        """The server with the fewest of our streams among those that are healthy and not `tried`."""
        healthy = [s for s in self.servers if not s.breaker.is_open and s not in tried]
        return min(healthy, key=lambda server: server.num_open, default=None)

    async def wait_for_server(self) -> None:
        """Wait until a server takes requests."""
        while not self.is_healthy:
            self._any_back.clear()
            await self._any_back.wait()

    @property
    def is_healthy(self) -> bool:
        """True if any server takes requests."""
        return any(not server.breaker.is_open for server in self.servers)

    @property
    def load(self) -> EngineLoad | None:
        """The sum of what the servers last reported; None where none does."""
        loads = [s.load for s in self.servers if s.load is not None and not s.breaker.is_open]
        return total_load(loads) if loads else None

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
        """Poll it while it is healthy, probe it while it is not: that generates a token at most."""
        polls = True
        while True:
            if server.breaker.is_open:
                await self._probe(server)
            elif polls:
                polls = await self._poll(server)
            await asyncio.sleep(self.options.poll_s)

    async def _watch_health(self, server: RemoteServer) -> None:
        """Ask for its health now and then, and where its streams are silent; polls continue meanwhile."""
        loop = asyncio.get_running_loop()
        next_s = loop.time() + HEALTH_S
        while True:
            if not server.breaker.is_open and (loop.time() >= next_s or self._is_silent(server)):
                next_s = loop.time() + HEALTH_S
                await self._check_health(server)
            await asyncio.sleep(self.options.poll_s)

    async def _poll(self, server: RemoteServer) -> bool:
        """Read its load; False where the server has none to read: a router, or an older SGLang."""
        began_s = asyncio.get_running_loop().time()
        try:
            await server.poll()
        except Refusal as refused:
            return refused.status != NOT_FOUND
        except ServerGone:
            self._mark_missed(server, began_s)
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
                self._mark_unhealthy(server)
                return
        except ServerGone:
            if self._is_silent(server):
                self._mark_unhealthy(server)
            else:
                self._mark_missed(server, began_s)
            return
        server.touch()  # it generates, or nothing here tells whether it does: each stream has its time

    async def _probe(self, server: RemoteServer) -> None:
        if await self._is_back(server):
            server.breaker.close()
            self._any_back.set()
        else:
            self._cut(server, only_silent=True)

    async def _is_back(self, server: RemoteServer) -> bool:
        try:
            same = (await server.facts()).identity == self._identity
            await server.get("/health", HEALTH_TIMEOUT_S)
        except (Refusal, ServerGone):
            return False
        return same

    def _mark_unhealthy(self, server: RemoteServer) -> None:
        if not server.breaker.is_open:
            server.breaker.trip()
            self._cut(server, only_silent=True)

    def _mark_missed(self, server: RemoteServer, began_s: float) -> None:
        """Count a request of ours that got no answer, unless anything else was received since it began."""
        was_open = server.breaker.is_open
        if not server.answered_since(began_s):
            server.breaker.failed()
            if server.breaker.is_open and not was_open:
                self._cut(server)

    def _is_silent(self, server: RemoteServer) -> bool:
        return server.silent_s(asyncio.get_running_loop().time()) >= self.options.stall_s

    def _cut(self, server: RemoteServer, *, only_silent: bool = False) -> None:
        if not only_silent or self._is_silent(server):
            self.faults.fault("stalled", server.url)
            server.cut()
            self._on_hung()
