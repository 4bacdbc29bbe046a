"""The work of the processes that this one starts: processor time, bytes, and the stage of a start.

Everything here blocks: it reads the table of all processes, which takes some 50 us for each of them.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable
from typing import NamedTuple

import psutil

IDLE_CPU_SHARE = 0.01
"""Share of a core below which processes do not compute; idle ones of SGLang take 0.2%."""
MIN_CPU_S = 0.05
"""Processor time that counts, however short the silence: a few ticks of the kernel's clock."""
COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "ninja", "cc1plus", "c++", "g++", "gcc", "clang"}
)
SCHEDULER_TITLE = "sglang::sched"
"""The title of a scheduler once its imports are done, as far as the kernel keeps it."""
COMPILE = "compiling kernels"
IMPORT = "importing SGLang"
LOAD = "loading the weights and setting up KV memory"
WARM_UP = "warming up"


class Work(NamedTuple):
    """The work of a start so far: its processes, their processor time, and the bytes that they moved."""

    pids: frozenset[int]
    cpu_s: float
    num_bytes: int


UNSEEN = Work(frozenset(), 0.0, 0)


class StartWork:
    """The work of what this process starts from now on, and of its threads whose names begin so."""

    def __init__(self, thread_name: str) -> None:
        self._process = psutil.Process()
        self._thread_name = thread_name
        self._older = set[int]()
        with contextlib.suppress(psutil.Error):  # then nothing is seen later either
            self._older.update(child.pid for child in self._process.children(recursive=True))

    def __call__(self) -> Work:
        """All of it so far."""
        pids, cpu_s, num_bytes = set[int](), 0.0, 0
        for child in started_by([self._process.pid]):
            if child.pid in self._older:
                continue
            with contextlib.suppress(psutil.Error), child.oneshot():
                cpu_s += sum(child.cpu_times()[:4])  # with what it has awaited, as short runs of compilers
                pids.add(child.pid)
                moved = child.io_counters()  # last, as not every container shows it
                num_bytes += moved.read_chars + moved.write_chars + moved.read_bytes
        named = [t.native_id for t in threading.enumerate() if t.name.startswith(self._thread_name)]
        cpu_s += sum(t.user_time + t.system_time for t in self._process.threads() if t.id in named)
        return Work(frozenset(pids), cpu_s, num_bytes)


def has_computed(cpu_s: float, since_s: float) -> bool:
    """True if processes that took so much processor time in `since_s` seconds have done more than wait."""
    return cpu_s >= max(MIN_CPU_S, IDLE_CPU_SHARE * since_s)


def started_cpu_s(pids: Iterable[int]) -> float:
    """Processor time, so far, of what these processes have started, and of what that has started.

    Those that have ended are in the time of the one that awaited them.
    """
    total_s, parents = 0.0, list(pids)
    for pid in parents:
        with contextlib.suppress(psutil.Error):
            times = psutil.Process(pid).cpu_times()
            total_s += times.children_user + times.children_system
    for process in started_by(parents):
        with contextlib.suppress(psutil.Error):
            total_s += sum(process.cpu_times()[:4])
    return total_s


def started_by(pids: Iterable[int]) -> list[psutil.Process]:
    """The processes that these have started, and those that these started in turn."""
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
    processes, parents = list[psutil.Process](), list(pids)
    while parents:
        started = children.pop(parents.pop(), ())
        processes += started
        parents += (process.pid for process in started)
    return processes


def launch_stage(pid: int) -> str:
    """The stage of the launch that process `pid` has begun; for people who wait for it."""
    names = list[str]()
    for process in started_by([pid]):
        with contextlib.suppress(psutil.Error):
            names.append(process.name())
    return stage_by_names(names)


def stage_by_names(names: Iterable[str]) -> str:
    """The stage in which processes of these names run."""
    seen = set(names)
    if seen & COMPILERS:
        return COMPILE
    return LOAD if any(name.startswith(SCHEDULER_TITLE) for name in seen) else IMPORT
