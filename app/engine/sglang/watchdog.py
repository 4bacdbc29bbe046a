"""Notices an engine that lives and makes no progress.

A long prefill is silent too. While the load that the scheduler reports still changes, the silence may last
`BUSY_FACTOR` times as long. A forward pass whose kernels are compiled first is silent for minutes. Compilers
are processes that the scheduler starts: while these compute, the engine does not hang. The schedulers' own
processor time proves nothing, as ranks in a deadlock spin.

`SGLangRun.lose` (app.engine.sglang.run) ends an engine that was found hanging. A start has a time limit
instead (app.engine.sglang.engine).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

BUSY_FACTOR = 3
CHECKS_PER_LIMIT = 8
MAX_INTERVAL_S = 5.0
COMPILER_CPU_SHARE = 0.01
"""Share of a core below which compilers only wait."""
MIN_COMPILER_CPU_S = 0.05
"""Processor time that counts, however short the silence: a few ticks of the kernel's clock."""


class Progress(NamedTuple):
    """The progress of an engine: open choices, batches of output so far, its load."""

    open_choices: int
    batches: int
    load: Any


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
        self.interval_s = min(MAX_INTERVAL_S, hang_s / CHECKS_PER_LIMIT)
        self._hang_s = hang_s
        self._progress = progress
        self._on_hang = on_hang
        self._clock_s = clock_s
        self._checked_s = self._output_s = self._load_s = clock_s()
        self._last = Progress(0, 0, None)
        self._compiled_s = compiled_s
        self._compiled: tuple[float, float] | None = None
        """The first reading of the compilers' processor time in this silence: when, and how much."""

    @property
    def is_silent(self) -> bool:
        """True if checks have seen no output for half the limit, so that compilers count."""
        return self._clock_s() - self._output_s >= self._hang_s / 2

    async def run(self) -> None:
        """Check until the engine hangs."""
        compiled_s = None
        while not self.check(compiled_s):  # silence is no event
            await asyncio.sleep(self.interval_s)
            compiled_s = await asyncio.to_thread(self._compiled_s) if self.is_silent else None

    def check(self, compiled_s: float | None) -> bool:
        """Check once; True if the engine hangs. `compiled_s` is None where it was not measured."""
        now_s, progress = self._clock_s(), self._progress()
        # So late that this process stood still itself: the engine's output has not been read yet.
        is_late = now_s - self._checked_s > 2 * self.interval_s
        is_idle = not progress.open_choices or not self._last.open_choices
        if is_late or is_idle or progress.batches != self._last.batches:
            self._output_s = self._load_s = now_s
        elif progress.load != self._last.load:
            self._load_s = now_s
        self._checked_s, self._last = now_s, progress
        if self._compiles(now_s, compiled_s):
            self._output_s = self._load_s = now_s
        silent_s = now_s - self._output_s
        hangs = silent_s >= BUSY_FACTOR * self._hang_s or now_s - self._load_s >= self._hang_s
        if hangs:
            self._on_hang(silent_s)
        return hangs

    def _compiles(self, now_s: float, compiled_s: float | None) -> bool:
        """True if compilers have computed in a silence of half the limit."""
        if now_s - self._output_s < self._hang_s / 2 or compiled_s is None:
            self._compiled = None
            return False
        if self._compiled is None:
            self._compiled = now_s, compiled_s
        first_s, first = self._compiled
        return compiled_s - first >= max(MIN_COMPILER_CPU_S, COMPILER_CPU_SHARE * (now_s - first_s))
