"""What a soak does to the server: which moments, and which of its processes."""

from __future__ import annotations

import asyncio
import random
import signal
import sys
import time
from collections import Counter
from typing import Literal, NamedTuple

from scripts.crash.http import Gone, get_json
from scripts.crash.machine import ENGINE_PROCESSES
from scripts.crash.soak_lives import Lives
from scripts.crash.soak_traffic import SoakTraffic

FaultKind = Literal["engine", "TERM", "KILL", "burst", "pause"]
HANG_S = 8.0
"""Seconds after which a stopped engine counts as hung; above what a busy machine takes for a step."""
POLL_S = 0.1
BACK_S = 400.0
"""Seconds within which an engine must be back."""
_EARLY_KILL = 0.2
"""Share of starts after a kill of the server that are killed as well."""


class Fault(NamedTuple):
    """One thing that is done, `after_s` seconds after the one before."""

    after_s: float
    kind: FaultKind


def planned(rng: random.Random, *, may_restart: bool, has_processes: bool) -> list[Fault]:
    """The faults of a round: the server is stopped and killed only where `may_restart`."""
    weights: dict[FaultKind, int] = {"engine": 4 * has_processes, "pause": 2 * (not has_processes)}
    if may_restart:
        weights |= {"TERM": 4, "KILL": 3}
    faults = [Fault(rng.uniform(1, 15), "burst")]
    for number in range(rng.choices((1, 2, 3), (50, 38, 12))[0]):
        kind = rng.choices(list(weights), list(weights.values()))[0]
        after_s = rng.uniform(2, 15) if number == 0 else rng.uniform(0.05, 25)
        faults.append(Fault(after_s, kind))
    if rng.random() < 0.5:
        faults.insert(rng.randrange(len(faults)), Fault(rng.uniform(0, 5), "burst"))
    return faults


class Disturber:
    """Does the faults of a round, and sees when the engine is back."""

    def __init__(self, lives: Lives, traffic: SoakTraffic, rng: random.Random) -> None:
        self._lives = lives
        self._traffic = traffic
        self._rng = rng
        self.done: Counter[str] = Counter()
        self._is_away = False
        self._watching: asyncio.Task[None] | None = None

    async def disturb(self, faults: list[Fault]) -> None:
        """Do what is planned. Raises ServerFailed where a start fails."""
        for fault in faults:
            await asyncio.sleep(fault.after_s)
            match fault.kind:
                case "burst":
                    self._traffic.burst()
                    self.done["burst"] += 1
                case "engine":
                    self._lose_engine()
                case "TERM":
                    self._say("SIGTERM")
                    await self._lives.stop()
                    await self._start()
                case "KILL":
                    self._say("kill -9 of the server")
                    await self._lives.kill()
                    if self._rng.random() < _EARLY_KILL:
                        await self._early_kill()
                    await self._start()
                case "pause":
                    pass
        if self._watching is not None:
            await self._watching

    async def _start(self) -> None:
        self._is_away = False
        await self._lives.start()

    async def _early_kill(self) -> None:
        """Kill the server while it starts. Its process is there first: else the kill would miss it."""
        server = await self._lives.begin()
        starting = asyncio.create_task(server.ready())
        await asyncio.wait([starting], timeout=self._rng.uniform(0.2, 12))
        self._say("kill -9 of the server in its start")
        await self._lives.kill()
        await asyncio.gather(starting, return_exceptions=True)

    def _lose_engine(self) -> None:
        process = self._rng.choice(ENGINE_PROCESSES)
        signum = self._rng.choice((signal.SIGKILL, signal.SIGSTOP))
        if not self._lives.signal_engine(process, signum, while_away=self._is_away):
            self.done["no engine to kill"] += 1
            return
        self._say(f"{signum.name} {process}{' while the engine is away' if self._is_away else ''}")
        if not self._is_away:
            self._is_away = True
            self._watching = asyncio.create_task(self._see_return())

    async def _see_return(self) -> None:
        """Until the server has been away, and is ready again; a loss in between is no outage of its own."""
        life, until_s, was_away = self._lives.now, time.monotonic() + BACK_S, False
        while time.monotonic() < until_s and self._lives.now is life and not life.ended_s:
            try:
                status, _ = await get_json(self._lives.port, "/readyz")
            except (*Gone, OSError):
                status = 0
            was_away |= status == 503
            if status == 200 and was_away:
                break
            await asyncio.sleep(POLL_S)
        self._is_away = False

    def _say(self, what: str) -> None:
        self.done[what] += 1
        print(f"  {what}", file=sys.stderr, flush=True)
