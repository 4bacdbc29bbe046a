"""Notices an engine that lives and does nothing: choices are open, and no output comes.

A long prefill, or a kernel that is compiled, is silent too. While the load that the scheduler reports
still changes, the silence may last `PATIENCE` times as long.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, NamedTuple

PATIENCE = 3
LOOKS = 8
"""How often the watchdog looks while the engine may be silent."""
LONGEST_LOOK_S = 5.0


class Progress(NamedTuple):
    """What an engine has to show: open choices, batches of output so far, its load."""

    open_choices: int
    batches: int
    load: Any


class HangWatchdog:
    """Calls `on_hang` with the seconds of silence, once, when an engine makes no progress for `hang_s`."""

    def __init__(
        self,
        hang_s: float,
        progress: Callable[[], Progress],
        on_hang: Callable[[float], None],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._hang_s = hang_s
        self._progress = progress
        self._on_hang = on_hang
        self._clock_s = clock_s
        self.interval_s = min(hang_s / LOOKS, LONGEST_LOOK_S)
        self._looked_s = self._output_s = self._load_s = clock_s()
        self._last = Progress(0, 0, None)

    async def run(self) -> None:
        """Look until the engine hangs."""
        while not self.look():  # noqa: ASYNC110  # silence is no event
            await asyncio.sleep(self.interval_s)

    def look(self) -> bool:
        """Look once; whether the engine hangs."""
        now_s, seen = self._clock_s(), self._progress()
        # When this process itself stood still, what the engine said meanwhile has not been read yet.
        late = now_s - self._looked_s > 2 * self.interval_s
        self._looked_s = now_s
        if late or not seen.open_choices or not self._last.open_choices or seen.batches != self._last.batches:
            self._output_s = self._load_s = now_s
        elif seen.load != self._last.load:
            self._load_s = now_s
        self._last = seen
        silent_s = now_s - self._output_s
        hangs = silent_s >= PATIENCE * self._hang_s or now_s - self._load_s >= self._hang_s
        if hangs:
            self._on_hang(silent_s)
        return hangs
