"""A server process that this one starts, watches, starts again when it dies, and stops with its group.

It gets a port of its own on the loopback address, and whatever is secret over its standard input:
arguments can be read by every user of the machine. What it prints is kept while it starts, for the
message when it fails, and thrown away after: a running server's lines may quote prompts.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.engine.supervise import FIRST_PAUSE_S, Backoff, supervise

LOOPBACK = "127.0.0.1"
STEADY_S = 60.0
"""A process that ran this long is restarted without the pauses of earlier deaths."""
STOP_GRACE_S = 10.0
TAIL_LINES = 30
PIPE_WAIT_S = 1.0
"""Seconds to wait for the end of its output, once the process and its group are gone."""


@dataclass(frozen=True, slots=True)
class ChildCommand:
    """The command that starts a server on a port: arguments, and the bytes for its standard input."""

    argv: Sequence[str]
    stdin: bytes = b""


class ChildServer:
    """One process and its successors, on one port. `on_exit` receives the reason of each death."""

    def __init__(
        self,
        command: Callable[[int], ChildCommand],
        *,
        on_exit: Callable[[str], None] = lambda _reason: None,
        first_pause_s: float = FIRST_PAUSE_S,
        stop_grace_s: float = STOP_GRACE_S,
    ) -> None:
        self._command = command
        self._on_exit = on_exit
        self._backoff = Backoff(first_pause_s)
        self._stop_grace_s = stop_grace_s
        self._port = 0
        self._reserved: socket.socket | None = None
        self._process: asyncio.subprocess.Process | None = None
        self._watching: asyncio.Task[None] | None = None
        self._lines: deque[str] = deque(maxlen=TAIL_LINES)
        self._keeps_lines = True
        self.num_starts = 0
        self.failure: str | None = None
        """The reason of the last process's end, until the next runs; None while one runs."""

    @property
    def url(self) -> str:
        """The address of the server, once started."""
        return f"http://{LOOPBACK}:{self._port}"

    @property
    def pid(self) -> int | None:
        """The id of the running process; None without one."""
        return None if self._process is None or self._process.returncode is not None else self._process.pid

    async def start(self) -> None:
        """Start the first process and watch it. It takes requests when it answers, not when this returns."""
        self._reserved = reserve_port()
        self._port = self._reserved.getsockname()[1]
        await self._spawn()
        self._watching = asyncio.create_task(supervise(self._run_once, self._backoff), name="child")

    def mark_up(self) -> None:
        """Note that the server answers: from now on its output is thrown away."""
        self._keeps_lines = False
        self._lines.clear()

    def kill(self) -> None:
        """End a process that hangs, with all that it started; the next one is started as after any death."""
        if self.pid is not None:
            _kill_group(self.pid)

    async def aclose(self) -> None:
        """Stop it and everything it started; a second call does nothing."""
        watching, self._watching = self._watching, None
        if watching is not None:
            watching.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watching
        process, self._process = self._process, None
        if process is not None:
            await self._stop(process)
        if self._reserved is not None:
            self._reserved.close()

    # --- inside

    async def _spawn(self) -> None:
        command = self._command(self._port)
        self._process = process = await asyncio.create_subprocess_exec(
            *command.argv,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            start_new_session=True,  # a group of its own, which Ctrl-C does not reach
        )
        self.num_starts += 1
        self.failure = None
        assert process.stdin is not None
        with contextlib.suppress(OSError):  # it may be dead already; the watch will see that
            process.stdin.write(command.stdin)
            await process.stdin.drain()
        process.stdin.close()

    async def _run_once(self) -> bool:
        """Start a process unless one runs, and wait for its end; True if it ran for `STEADY_S`."""
        if self.failure is not None:
            try:
                await self._spawn()
            except OSError as exc:  # the machine may have room for another process later
                self.failure = f"the process could not be started: {type(exc).__name__}"
                return False
        assert self._process is not None
        loop = asyncio.get_running_loop()
        process, began_s = self._process, loop.time()
        reading = asyncio.ensure_future(self._read_output(process))
        try:
            await process.wait()
            _kill_group(process.pid)  # what it had started
            await asyncio.wait([reading], timeout=PIPE_WAIT_S)
        finally:
            reading.cancel()
        self.failure = self._reason(process.returncode)
        self._on_exit(self.failure)
        return loop.time() - began_s >= STEADY_S

    async def _read_output(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdout is not None
        rest = b""
        while data := await process.stdout.read(65_536):
            if self._keeps_lines:
                *lines, rest = (rest + data).split(b"\n")
                rest = rest[-4096:]
                self._lines.extend(line.decode(errors="replace")[:500] for line in lines if line.strip())

    def _reason(self, status: int | None) -> str:
        """The exit status, and the last line of output where the server never started."""
        how = f"the process ended with status {status}"
        return f"{how}: {self._lines[-1].strip()}" if self._lines else how

    async def _stop(self, process: asyncio.subprocess.Process) -> None:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._stop_grace_s):
                    await process.wait()
        _kill_group(process.pid)
        await process.wait()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(PIPE_WAIT_S):
                await self._read_output(process)


def reserve_port() -> socket.socket:
    """A port of the loopback address that only a server with SO_REUSEADDR, which asyncio sets, can listen on.

    The socket is bound and never listens. As long as it is open, the kernel gives its port to no connection
    and to no request for a free port; a model takes long to load before its server binds.
    """
    reserved = socket.socket()
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    reserved.bind((LOOPBACK, 0))
    return reserved


def _kill_group(pid: int) -> None:
    """The group outlives its leader as long as it has members, and its number is not given away before."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)
