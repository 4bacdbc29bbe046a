"""Notices an engine that lives and does nothing: choices are open, and no output comes.

A long prefill is silent too. While the load that the scheduler reports still changes, the silence may last
`PATIENCE` times as long. A forward pass whose kernels are compiled first is silent for minutes. Compilers are
processes that the scheduler starts: while these compute, the engine does not hang. The schedulers' own
processor time says nothing, as ranks that wait for one another in vain compute without rest.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import psutil

PATIENCE = 3
LOOKS = 8
"""How often the watchdog looks while the engine may be silent."""
LONGEST_LOOK_S = 5.0
IDLE_CPU_SHARE = 0.01
"""Share of a core below which processes do not compute; idle ones of SGLang take 0.2%."""
LEAST_CPU_S = 0.05
"""Processor time that counts, however short the silence: a few ticks of the kernel's clock."""


class Progress(NamedTuple):
    """What an engine has to show: open choices, batches of output so far, its load."""

    open_choices: int
    batches: int
    load: Any


def has_computed(cpu_s: float, since_s: float) -> bool:
    """Whether processes that took so much processor time in `since_s` seconds have done more than wait."""
    return cpu_s >= max(LEAST_CPU_S, IDLE_CPU_SHARE * since_s)


def started_cpu_s(pids: Iterable[int]) -> float:
    """Processor time, so far, of what these processes have started, and of what that has started.

    Those that have ended are in the time of the one that awaited them. It blocks, as `started_by` does.
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
    """The processes that these have started, and those that these started in turn.

    It blocks: it reads the table of all processes, once, which takes some 50 us for each of them.
    """
    children: dict[int, list[psutil.Process]] = {}
    for process in psutil.process_iter(["ppid"]):
        children.setdefault(process.info["ppid"], []).append(process)
    processes, parents = list[psutil.Process](), list(pids)
    while parents:
        started = children.pop(parents.pop(), ())
        processes += started
        parents += (process.pid for process in started)
    return processes


class HangWatchdog:
    """Calls `on_hang` with the seconds of silence, once, when an engine makes no progress for `hang_s`.

    `compiled_s` is the processor time of compilers; a thread reads it, and only while an engine is silent.
    """

    def __init__(
        self,
        hang_s: float,
        progress: Callable[[], Progress],
        on_hang: Callable[[float], None],
        clock_s: Callable[[], float] = time.monotonic,
        *,
        compiled_s: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._hang_s = hang_s
        self._progress = progress
        self._on_hang = on_hang
        self._clock_s = clock_s
        self.interval_s = min(hang_s / LOOKS, LONGEST_LOOK_S)
        self._looked_s = self._output_s = self._load_s = clock_s()
        self._last = Progress(0, 0, None)
        self._compiled_s = compiled_s
        self._compiled: tuple[float, float] | None = None
        """When the processor time of compilers was first read in this silence, and what it was."""

    @property
    def is_silent(self) -> bool:
        """Whether looks have seen no output for half the limit, so that compilers count."""
        return self._clock_s() - self._output_s >= self._hang_s / 2

    async def run(self) -> None:
        """Look until the engine hangs."""
        compiled_s = None
        while not self.look(compiled_s):  # silence is no event
            await asyncio.sleep(self.interval_s)
            compiled_s = await asyncio.to_thread(self._compiled_s) if self.is_silent else None

    def look(self, compiled_s: float | None) -> bool:
        """Look once; whether the engine hangs. `compiled_s` is None where nobody has asked for it."""
        now_s, seen = self._clock_s(), self._progress()
        # When this process itself stood still, what the engine said meanwhile has not been read yet.
        late = now_s - self._looked_s > 2 * self.interval_s
        self._looked_s = now_s
        if late or not seen.open_choices or not self._last.open_choices or seen.batches != self._last.batches:
            self._output_s = self._load_s = now_s
        elif seen.load != self._last.load:
            self._load_s = now_s
        self._last = seen
        if self._compiles(now_s, compiled_s):
            self._output_s = self._load_s = now_s
        silent_s = now_s - self._output_s
        hangs = silent_s >= PATIENCE * self._hang_s or now_s - self._load_s >= self._hang_s
        if hangs:
            self._on_hang(silent_s)
        return hangs

    def _compiles(self, now_s: float, compiled_s: float | None) -> bool:
        """Whether compilers have computed in a silence of half the limit."""
        if now_s - self._output_s < self._hang_s / 2 or compiled_s is None:
            self._compiled = None
            return False
        if self._compiled is None:
            self._compiled = now_s, compiled_s
        first_s, first = self._compiled
        return has_computed(compiled_s - first, now_s - first_s)
