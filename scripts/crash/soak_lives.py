"""The server under a soak: its lives, and what was done to each."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from app.store.database import FILE_NAME
from scripts.crash.findings import Findings
from scripts.crash.machine import process_of
from scripts.crash.server import Server

EXPECTED_ERRORS = ("engine_lost", "request_quarantined")
"""What the log of a server whose engine is killed has at its severest."""


WATCH_S = 0.3
"""Seconds between two looks at the ledger, which keeps keys for `retention_s`, or until the next start."""

LOCKED_S = 10.0
"""Seconds for which the store may be out of reach."""


class Loss(NamedTuple):
    """A process of the engine that was killed or stopped."""

    at_s: float
    process: str
    signum: signal.Signals
    while_away: bool
    """Whether the engine was away already."""


@dataclass(eq=False)
class Life:
    """One process of the server."""

    server: Server
    num_suspended: int
    """Streams that the life before has left suspended."""
    began_s: float = field(default_factory=time.monotonic)
    ended_s: float = 0.0
    """0 while it lives."""
    end: str = ""
    losses: list[Loss] = field(default_factory=list)


class Lives:
    """One data directory, and one server at a time on it."""

    def __init__(self, data_dir: Path, arguments: Sequence[str], findings: Findings) -> None:
        self._data_dir = data_dir
        self._arguments = arguments
        self._findings = findings
        self.all: list[Life] = []
        self.keys: dict[str, str] = {}
        """The Idempotency-Keys of requests by id; the store forgets those that are free again."""
        self._last_seq = 0

    @property
    def now(self) -> Life:
        """The last life, ended or not."""
        return self.all[-1]

    @property
    def port(self) -> int:
        """Where the server listens; 0 while it does not."""
        return 0 if self.now.ended_s else self.now.server.port

    @property
    def path(self) -> Path:
        """The store."""
        return self._data_dir / FILE_NAME

    async def begin(self) -> Server:
        """Begin a life; its server takes no requests yet."""
        num_suspended = await self._recheck()
        server = await Server.start(self._data_dir, self._arguments)
        self.all.append(Life(server, num_suspended))
        return server

    async def start(self) -> None:
        """Begin a life, and wait until it takes requests. Raises ServerFailed."""
        await (await self.begin()).ready()

    async def stop(self) -> None:
        """SIGTERM; the process must end with 0."""
        life = self.now
        life.server.terminate()
        status = await life.server.stopped()
        if status is None:
            await life.server.kill()
        self._ended(life, "TERM")
        self._findings.check(status == 0, "the server ends with status 0 after SIGTERM", status=status)

    async def kill(self) -> None:
        """SIGKILL; its children must follow."""
        life = self.now
        if not life.ended_s:
            life.ended_s = time.monotonic()
            await life.server.kill()
            self._ended(life, "KILL")

    def signal_engine(self, process: str, signum: signal.Signals, *, while_away: bool) -> bool:
        """Kill or stop a process of the engine; False where there is none."""
        pid = process_of(self.now.server.pid, process)
        if pid is None:
            return False
        try:
            os.kill(pid, signum)
        except ProcessLookupError:
            return False
        self.now.losses.append(Loss(time.monotonic(), process, signum, while_away))
        return True

    def ended_by(self, how: str, began_s: float, ended_s: float) -> bool:
        """Whether a life ended that way between two times."""
        return any(life.end == how and began_s <= life.ended_s <= ended_s for life in self.all)

    def num_losses(self, began_s: float, ended_s: float) -> int:
        """How often the engine was lost between two times."""
        return sum(began_s <= loss.at_s <= ended_s for life in self.all for loss in life.losses)

    def _ended(self, life: Life, how: str) -> None:
        life.ended_s, life.end = life.ended_s or time.monotonic(), how
        self.check_log(life)

    def check_log(self, life: Life) -> None:
        """Nothing but losses of the engine is an error; lines that are not of the log have no traceback."""
        server = life.server
        faults = [line for line in server.faults if not any(f'"{name}"' in line for name in EXPECTED_ERRORS)]
        tracebacks = [line for line in server.noise if "Traceback" in line]
        self._findings.check(not faults, "nothing breaks in the server", log=faults[:5])
        if not life.losses and life.end != "KILL":
            self._findings.check(not tracebacks, "nothing raises in the server", noise=server.noise[-40:])

    async def watch(self) -> None:
        """Note the keys of requests for ever."""
        while True:
            await self._recheck()
            await asyncio.sleep(WATCH_S)

    async def _recheck(self) -> int:
        """What `_look` does, as soon as it can: a server that stops has the file to itself for a moment."""
        until_s = time.monotonic() + LOCKED_S
        while True:
            try:
                return self._look()
            except sqlite3.OperationalError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(WATCH_S / 10)

    def _look(self) -> int:
        """Note the keys of new requests; how many streams are suspended."""
        if not self.path.exists():
            return 0
        with closing(sqlite3.connect(f"file:{self.path}?mode=ro", uri=True)) as connection:
            query = "SELECT seq, id, idempotency_key FROM requests WHERE seq > ? ORDER BY seq"
            for seq, id_, key in connection.execute(query, (self._last_seq,)):
                self._last_seq = seq
                if key is not None:
                    self.keys[id_] = key
            count: int = connection.execute("SELECT count(*) FROM suspended").fetchone()[0]
        return count
