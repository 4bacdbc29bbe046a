"""The stage of SGLang's start, by the processes that it has started; for people who wait for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import psutil

from app.engine.sglang.watchdog import started_by

COMPILERS = frozenset(
    {"nvcc", "cicc", "ptxas", "cudafe++", "fatbinary", "ninja", "cc1plus", "c++", "g++", "gcc", "clang"}
)
SCHEDULER_TITLE = "sglang::sched"
"""What a scheduler calls itself once its imports are done, as far as the kernel keeps it."""
COMPILE = "compiling kernels"
IMPORT = "importing SGLang"
LOAD = "loading the weights and setting up KV memory"
WARM_UP = "warming up"


def launch_stage(pid: int) -> str:
    """The stage of the launch that process `pid` has begun. It blocks, as `started_by` does."""
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
