"""The processes that this one starts: their processor time, and the stage of a start.

Everything here blocks: it reads the table of all processes, which takes some 50 us for each of them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "ninja", "cc1plus", "c++", "g++", "gcc", "clang"}
)
SCHEDULER_TITLE = "sglang::sched"
"""The title of a scheduler once its imports are done, as far as the kernel keeps it."""
COMPILE = "compiling kernels"
IMPORT = "importing SGLang"
LOAD = "loading the weights and setting up KV memory"
WARM_UP = "warming up"


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
