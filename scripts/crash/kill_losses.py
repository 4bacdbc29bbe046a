"""How the kill test loses something: a process of the engine, or the whole server, which is started again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from scripts.crash.engine_clients import Client
from scripts.crash.findings import Findings
from scripts.crash.http import Gone, get_json
from scripts.crash.machine import ENGINE_PROCESSES, process_of
from scripts.crash.server import Server

ENGINE_SIGNALS = {"KILL": [signal.SIGKILL], "STOP": [signal.SIGSTOP], "MIX": [signal.SIGKILL, signal.SIGSTOP]}
SERVER_SIGNALS = {"KILL": [signal.SIGKILL], "TERM": [signal.SIGTERM], "MIX": [signal.SIGKILL, signal.SIGTERM]}
POLL_S = 0.01
START_TIMEOUT_S = 300.0
DRAIN_S = 1.0


class Loss(Protocol):
    """A way of losing something under live streams."""

    server: Server

    async def lose(self, clients: Sequence[Client]) -> str:
        """Lose it, and wait until requests are served again; says what was lost."""
        ...


class EngineLoss:
    """A random process of the engine gets a signal; some clients drop meanwhile and come back."""

    def __init__(
        self, server: Server, signals: str, drops: float, rng: random.Random, findings: Findings
    ) -> None:
        self.server = server
        self._signals = ENGINE_SIGNALS[signals]
        self._drops = drops
        self._rng = rng
        self._findings = findings

    async def lose(self, clients: Sequence[Client]) -> str:
        """See Loss."""
        name, signum = self._rng.choice(ENGINE_PROCESSES), self._rng.choice(self._signals)
        pid = process_of(self.server.pid, name)
        assert pid is not None
        os.kill(pid, signum)
        await self._watch_outage(clients)
        return f"{signum.name} {name}"

    async def _watch_outage(self, clients: Sequence[Client]) -> None:
        """See the server not ready and ready again."""
        deadline_s, is_away = time.monotonic() + START_TIMEOUT_S, False
        dropping = [client for client in clients if self._rng.random() < self._drops]
        while time.monotonic() < deadline_s:
            status, _ = await get_json(self.server.port, "/readyz")
            if status != 200 and not is_away:
                is_away = True
                alive, _ = await get_json(self.server.port, "/healthz")
                self._findings.check(alive == 200, "the server is alive while the engine is away")
                for client in dropping:
                    client.drop()
            elif status == 200 and is_away:
                return
            await asyncio.sleep(POLL_S)
        self._findings.check(False, "the engine comes back", is_away=is_away)


class ServerLoss:
    """The server gets SIGKILL or SIGTERM, and starts again on the same data and port."""

    def __init__(
        self,
        server: Server,
        start: tuple[Path, Sequence[str]],
        signals: str,
        rng: random.Random,
        findings: Findings,
    ) -> None:
        self.server = server
        self._start = start
        self._signals = SERVER_SIGNALS[signals]
        self._rng = rng
        self._findings = findings
        self.was_killed = False
        """Whether the last loss was a SIGKILL."""

    async def lose(self, clients: Sequence[Client]) -> str:
        """See Loss."""
        del clients  # all of them lose their connections
        signum = self._rng.choice(self._signals)
        self.was_killed = signum is signal.SIGKILL
        if self.was_killed:
            await self.server.kill()
        else:
            self.server.terminate()
            self._findings.check(await self.server.stopped() == 0, "the server ends with status 0")
        outlived = [fault for fault in self.server.faults if "outlived" in fault]
        self._findings.check(not outlived, "no process outlives the server", outlived=outlived)
        self.server = await Server.start(*self._start)
        await self.server.ready()
        return f"{signum.name} server"


def free_port() -> int:
    """A port that nobody listens on."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


async def is_serving(port: int) -> bool:
    """Whether SGLang's own server has loaded its model."""
    try:
        status, _ = await get_json(port, "/model_info")
    except (*Gone, OSError, KeyError, ValueError):
        return False
    return status == 200
