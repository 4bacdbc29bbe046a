"""A server's process tree: started, timed by the CPU clock of each process, frozen, stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from operator import add, sub
from pathlib import Path

import psutil

ENGINE_TITLES = ("sglang::scheduler", "sglang::detokenizer")
START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 20.0
ORPHANS_TIMEOUT_S = 1.0


class ServerFailed(RuntimeError):
    """A server under test ended, or did not become ready."""


@dataclass(frozen=True, slots=True)
class CpuUse:
    """CPU seconds of a tree, user and system, split into what is compared and what is the engine's.

    `serving_user_s` is the user part of what is compared, which the kernel counts in ticks of 10 ms.
    """

    serving_s: float
    engine_s: float
    serving_user_s: float = 0.0

    def __add__(self, other: CpuUse) -> CpuUse:
        return CpuUse(*map(add, astuple(self), astuple(other)))

    def __sub__(self, earlier: CpuUse) -> CpuUse:
        return CpuUse(*map(sub, astuple(self), astuple(earlier)))


class ServerProcess:
    """One server and its process tree. CPU is read per process to the nanosecond."""

    def __init__(
        self, name: str, command: Sequence[str], port: int, log: Path, *, ready_path: str | None = None
    ) -> None:
        self.name = name
        self.port = port
        self.command = list(command)
        self.ready_path = ready_path or ("/readyz" if "app" in self.command else "/health")
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, environment: Mapping[str, str] | None = None) -> None:
        """Start the tree in a session of its own, its output in the log file."""
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                self.command,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env={**os.environ, **(environment or {})},
            )

    def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Return once the ready path answers 200. Raises ServerFailed."""
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            if self._running().poll() is not None:
                raise ServerFailed(
                    f"{self.name} ended with {self._running().returncode}:\n{self._log_tail()}"
                )
            with contextlib.suppress(urllib.error.URLError, OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{self.port}{self.ready_path}", timeout=5).close()
                return
            time.sleep(0.2)
        raise ServerFailed(f"{self.name} was not ready within {timeout_s:.0f} s:\n{self._log_tail()}")

    def cpu(self) -> CpuUse:
        """CPU used so far by the living tree."""
        used = CpuUse(0.0, 0.0)
        for process, is_engine in self._tree():
            seconds = _cpu_clock_s(process.pid)
            used += (
                CpuUse(0.0, seconds) if is_engine else CpuUse(seconds, 0.0, float(process.cpu_times().user))
            )
        return used

    def event_loop_s(self) -> float:
        """CPU seconds of the first process's main thread, in which an asyncio server has its event loop."""
        pid = self._running().pid
        return sum(t.user_time + t.system_time for t in psutil.Process(pid).threads() if t.id == pid)

    def rss_bytes(self) -> int:
        """Resident memory of everything but schedulers and detokenizers."""
        return sum(process.memory_info().rss for process, is_engine in self._tree() if not is_engine)

    def pin(self, cpus: set[int]) -> None:
        """Keep every thread of the tree on `cpus`."""
        for process, _ in self._tree():
            for thread in process.threads():
                os.sched_setaffinity(thread.id, cpus)

    def freeze(self) -> None:
        """SIGSTOP the tree: an idle scheduler polls, and must not take CPU from the other server."""
        self._signal_tree(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT the tree."""
        self._signal_tree(signal.SIGCONT)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL what is left of the tree; a second call does nothing."""
        if self._process is None:
            return
        tree = [process for process, _ in self._tree()]
        self.thaw()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(STOP_TIMEOUT_S)
        _wait_gone(tree, ORPHANS_TIMEOUT_S)
        for process in filter(_lives, tree):
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._process.wait()
        _wait_gone(tree, STOP_TIMEOUT_S)
        self._process = None

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None:
            raise ServerFailed(f"{self.name} is not started")
        return self._process

    def _tree(self) -> Iterator[tuple[psutil.Process, bool]]:
        """Each living process, and whether it is, or descends from, a scheduler or detokenizer."""
        pending = []
        with contextlib.suppress(psutil.NoSuchProcess):
            pending.append((psutil.Process(self._running().pid), False))
        while pending:
            process, within_engine = pending.pop()
            with contextlib.suppress(psutil.NoSuchProcess, ProcessLookupError):
                title = " ".join(process.cmdline())
                is_engine = within_engine or title.startswith(ENGINE_TITLES)
                children = process.children()
                yield process, is_engine
                pending += [(child, is_engine) for child in children]

    def _signal_tree(self, number: signal.Signals) -> None:
        for process, _ in self._tree():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.send_signal(number)

    def _log_tail(self) -> str:
        return self._log.read_text(errors="replace")[-3000:]


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
    return port


def machine_busy_s() -> float:
    """CPU seconds the whole machine has been busy: tells how much others used during a run."""
    times = psutil.cpu_times()
    return float(sum(times) - times.idle - getattr(times, "iowait", 0.0) - getattr(times, "guest", 0.0))


def _wait_gone(processes: Sequence[psutil.Process], timeout_s: float) -> None:
    deadline_s = time.monotonic() + timeout_s
    while any(map(_lives, processes)) and time.monotonic() < deadline_s:
        time.sleep(0.02)


def _lives(process: psutil.Process) -> bool:
    """Whether it still runs: an orphan that ended stays a zombie until init looks after it."""
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def _cpu_clock_s(pid: int) -> float:
    """The CPU clock of another process (clock_getcpuclockid(3)): all its threads, ended ones too."""
    return time.clock_gettime((~pid << 3) | 2)
