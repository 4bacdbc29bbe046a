"""The server as a process that is killed, and started again on the same data directory."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import psutil

ROOT = Path(__file__).parents[2]
START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 30.0
FOLLOW_TIMEOUT_S = 10.0


class ServerFailed(RuntimeError):
    """A server did not become ready."""


class Server:
    """One life of the server."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.port = 0
        self.started_at_s = time.monotonic()
        self.killed_at_s = 0.0
        """When it was killed, on the monotonic clock; 0 while it lives."""
        self.faults: list[str] = []
        """Errors in the log, and processes left behind."""
        self.noise: list[str] = []
        """Lines that are not of the log."""
        self.reconciled = 0
        self._process = process
        self._ready = asyncio.Event()
        self._reading = asyncio.create_task(self._read_log())

    @classmethod
    async def start(cls, data_dir: Path, arguments: Sequence[str]) -> Self:
        """Start a process; it is not ready yet."""
        environment = {k: v for k, v in os.environ.items() if not k.startswith("TOKENRING_")}
        flags = ["--port", "0", "--data-dir", str(data_dir), "--log-format", "json", *arguments]
        return cls(
            await asyncio.create_subprocess_exec(
                *[sys.executable, "-m", "app", "serve", *flags],
                cwd=ROOT,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.DEVNULL,
                stderr=asyncio.subprocess.PIPE,
            )
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._process.pid

    async def ready(self) -> None:
        """Wait until it takes requests. Raises ServerFailed."""
        ended = asyncio.create_task(self._process.wait())
        ready = asyncio.create_task(self._ready.wait())
        await asyncio.wait({ended, ready}, timeout=START_TIMEOUT_S, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        ready.cancel()
        if not self._ready.is_set():
            raise ServerFailed(
                f"not ready; exit status {self._process.returncode}: {self.faults} {self.noise}"
            )

    def terminate(self) -> None:
        """SIGTERM: it drains."""
        self._process.send_signal(signal.SIGTERM)

    async def kill(self) -> None:
        """SIGKILL, and wait until the process is gone, and its children with it."""
        if self._process.returncode is None:
            children = psutil.Process(self._process.pid).children(recursive=True)
            self.killed_at_s = time.monotonic()
            self._process.kill()
            await self._process.wait()
            self.faults += await _left_behind(children)
        self.killed_at_s = self.killed_at_s or time.monotonic()
        await self._reading

    async def stopped(self) -> int | None:
        """Wait for the end of a drain; the exit status, None when it does not end."""
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                status = await self._process.wait()
        except TimeoutError:
            return None
        self.killed_at_s = time.monotonic()
        await self._reading
        return status

    async def _read_log(self) -> None:
        assert self._process.stderr is not None
        async for raw in self._process.stderr:
            try:
                self._record(json.loads(raw))
            except json.JSONDecodeError:
                self.noise.append(raw.decode(errors="replace").rstrip())

    def _record(self, line: dict[str, Any]) -> None:
        if line["level"] in ("error", "critical"):
            self.faults.append(json.dumps(line))
        match line["event"]:
            case "listening":
                self.port = int(line["url"].rpartition(":")[2])
            case "reconciled":
                self.reconciled = line["requests"]
            case "ready":
                self._ready.set()


async def _left_behind(children: Sequence[psutil.Process]) -> list[str]:
    """Wait for an engine's processes to follow theirs; those that do not are killed, and named."""
    _, alive = await asyncio.to_thread(psutil.wait_procs, children, FOLLOW_TIMEOUT_S)
    for child in alive:
        child.kill()
    return [f"process {child.pid} outlived the server" for child in alive]
