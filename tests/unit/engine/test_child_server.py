"""A child server: started with a port, watched, started again, stopped with everything it started."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from app.engine.child_server import ChildCommand, ChildServer

# Writes its own id and that of a child of its own, then listens until it is killed.
SERVER = """
import os, socket, subprocess, sys
said = sys.stdin.read()
held = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
listening = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
open(sys.argv[2], "a").write(f"{os.getpid()} {held.pid} {said}\\n")
while True:
    listening.accept()[0].close()
"""
FAILS = "import sys; print('loading'); sys.exit('no such model: x')"


def runs(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


async def until(condition: Callable[[], Any]) -> None:
    """Wait for another process."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    """Where the servers write who they are, a line each."""
    path = tmp_path / "notes"
    path.touch()
    return path


@pytest.fixture
async def start(notes: Path) -> AsyncIterator[Callable[..., Awaitable[ChildServer]]]:
    """Children, stopped with the test."""
    children: list[ChildServer] = []

    async def begin(code: str = SERVER, on_exit: Callable[[str], None] = lambda _: None) -> ChildServer:
        def command(port: int) -> ChildCommand:
            return ChildCommand([sys.executable, "-c", code, str(port), str(notes)], b"a secret")

        child = ChildServer(command, on_exit=on_exit, first_pause_s=0.05, stop_grace_s=5)
        children.append(child)
        await child.start()
        return child

    yield begin
    for child in children:
        await child.aclose()


def said(notes: Path) -> list[list[str]]:
    """What the servers wrote, each its words."""
    return [line.split(maxsplit=2) for line in notes.read_text().splitlines()]


async def test_it_listens_on_its_port_and_gets_its_secret(start: Any, notes: Path) -> None:
    """The secret comes over standard input and is in no argument."""
    child = await start()
    await until(lambda: said(notes))
    port = int(child.url.rpartition(":")[2])
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    assert said(notes)[0] == [str(child.pid), said(notes)[0][1], "a secret"]
    assert "secret" not in " ".join(psutil.Process(child.pid).cmdline())


async def test_it_is_in_a_group_of_its_own(start: Any) -> None:
    """Ctrl-C does not reach it: when to stop is the server's to say."""
    child = await start()
    assert os.getpgid(child.pid) == child.pid != os.getpgid(0)


async def test_nobody_else_gets_its_port_while_it_loads(start: Any) -> None:
    """Until it listens, its port is neither bound by others nor given away as a free one."""
    child = await start("import time; time.sleep(600)")
    port = int(child.url.rpartition(":")[2])
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port))
    await child.aclose()
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))


async def test_a_process_that_cannot_be_started_is_tried_again(notes: Path) -> None:
    """The machine may have no room for a process at the first restart, and have some at the second."""
    programs = iter([sys.executable, "/no/such/program"])

    def command(port: int) -> ChildCommand:
        program = next(programs, sys.executable)
        return ChildCommand([program, "-c", SERVER, str(port), str(notes)], b"a secret")

    child = ChildServer(command, first_pause_s=0.05, stop_grace_s=5)
    await child.start()
    try:
        await until(lambda: said(notes))
        os.kill(child.pid or 0, signal.SIGKILL)
        await until(lambda: len(said(notes)) == 2)
        assert (child.num_starts, child.failure) == (2, None)
    finally:
        await child.aclose()


async def test_one_that_dies_is_started_again_on_the_same_port(start: Any, notes: Path) -> None:
    """What it had started is gone with it, and whoever watches was told."""
    deaths: list[str] = []
    child = await start(on_exit=deaths.append)
    await until(lambda: said(notes))
    url, first = child.url, child.pid
    os.kill(first, signal.SIGKILL)
    await until(lambda: len(said(notes)) == 2)
    assert child.url == url
    assert child.pid != first
    assert child.num_starts == 2
    assert child.failure is None
    assert len(deaths) == 1
    assert "-9" in deaths[0]
    await until(lambda: not runs(int(said(notes)[0][1])))


async def test_closing_stops_everything_it_started(start: Any, notes: Path) -> None:
    """The process, and the one it had started; twice is fine."""
    child = await start()
    await until(lambda: said(notes))
    pids = [int(pid) for pid in said(notes)[0][:2]]
    await child.aclose()
    await child.aclose()
    await until(lambda: not any(map(runs, pids)))
    assert child.pid is None


async def test_one_that_fails_says_why(start: Any) -> None:
    """The last line it said before it ended is in the reason."""
    reasons: list[str] = []
    child = await start(FAILS, reasons.append)
    await until(lambda: len(reasons) >= 2)
    assert reasons[0] == "the process ended with status 1: no such model: x"
    await child.aclose()


async def test_what_a_running_server_says_is_not_kept(start: Any, notes: Path) -> None:
    """Once it is up its lines may quote prompts."""
    reasons: list[str] = []
    child = await start(on_exit=reasons.append)
    await until(lambda: said(notes))
    child.mark_up()
    os.kill(child.pid, signal.SIGTERM)
    await until(lambda: reasons)
    assert reasons[0] == "the process ended with status -15"
