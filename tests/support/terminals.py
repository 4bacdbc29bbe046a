"""Commands as a user runs them: in a pipe, or at a pseudo-terminal that is typed into."""

from __future__ import annotations

import asyncio
import os
import pty
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from tests.support.servers import ROOT, WAIT_S

_ON_TERMINAL = (
    "import os, sys; os.close(os.open(os.ttyname(0), os.O_RDWR));"
    " os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"
)
"""Opening it makes it the controlling terminal of a new session: Ctrl-C is a signal then."""


def environment(**changes: str) -> dict[str, str]:
    """The environment without what changes how a command looks or whom it asks."""
    dropped = ("NO_COLOR", "FORCE_COLOR", "COLUMNS")
    clean = {k: v for k, v in os.environ.items() if k not in dropped and not k.startswith("TOKENRING_")}
    return {**clean, "PYTHONPATH": str(ROOT), "TERM": "xterm", **changes}


class Terminal:
    """A command at a terminal of its own. What it shows is read until an expected text is there."""

    def __init__(self, *argv: str, cwd: Path, **env: str) -> None:
        self._ours, theirs = pty.openpty()
        self.shown = ""
        """All that the command has written, carriage returns left out."""
        self._seen = 0
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_TERMINAL, "-m", "app", *argv],
            cwd=cwd,
            env=environment(**env),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            start_new_session=True,
        )
        os.close(theirs)
        os.set_blocking(self._ours, False)

    async def expect(self, text: str, timeout_s: float = WAIT_S) -> str:
        """Wait until the text is shown, behind what was expected before; gives what stands between."""
        async with asyncio.timeout(timeout_s):
            while (found := self.shown.find(text, self._seen)) < 0:
                if not await self._read():
                    raise AssertionError(f"{text!r} is not in {self.shown[self._seen :]!r}")
        between = self.shown[self._seen : found]
        self._seen = found + len(text)
        return between

    def type(self, text: str) -> None:
        """Type a text, as it is; control characters are keys."""
        os.write(self._ours, text.encode())

    def line(self, text: str) -> None:
        """Type a line."""
        self.type(text + "\n")

    async def exit_status(self) -> int:
        """Read to the end; gives the exit status."""
        async with asyncio.timeout(WAIT_S):
            while await self._read():
                pass
        return self._process.wait(20)

    def close(self) -> None:
        """End the command, whatever state it is in."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGKILL)
        self._process.wait()
        os.close(self._ours)

    async def _read(self) -> bool:
        """Read what comes next; False at the end."""
        readable = asyncio.Event()
        loop = asyncio.get_running_loop()
        loop.add_reader(self._ours, readable.set)
        try:
            await readable.wait()
            data = os.read(self._ours, 65536)
        except OSError:  # Linux: the other end is closed
            return False
        finally:
            loop.remove_reader(self._ours)
        self.shown += data.decode(errors="replace").replace("\r", "")
        return bool(data)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()


class Piped:
    """A command whose output goes into pipes."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.out = b""

    @classmethod
    async def run(cls, *argv: str, cwd: Path, given: bytes | None = None, **env: str) -> Self:
        """Start it; `given` is its standard input."""
        pipe, null = asyncio.subprocess.PIPE, asyncio.subprocess.DEVNULL
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "app",
            *argv,
            cwd=cwd,
            env=environment(**env),
            stdin=null if given is None else pipe,
            stdout=pipe,
            stderr=pipe,
        )
        if given is not None:
            assert process.stdin is not None
            process.stdin.write(given)
            process.stdin.close()
        return cls(process)

    async def read_words(self, count: int) -> None:
        """Read until it has written that many words."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WAIT_S):
            while len(self.out.split()) < count:
                data = await self.process.stdout.read(4096)
                assert data, self.out
                self.out += data

    async def ended(self) -> tuple[int, str, str]:
        """Exit status, standard output and standard error, once it has ended."""
        async with asyncio.timeout(WAIT_S):
            out, err = await self.process.communicate()
        assert self.process.returncode is not None
        return self.process.returncode, (self.out + out).decode(), err.decode()
