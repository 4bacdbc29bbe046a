"""Notices an engine that lives and does nothing, and a start that makes no progress.

A long prefill is silent too. While the load that the scheduler reports still changes, the silence may last
`PATIENCE` times as long. A forward pass whose kernels are compiled first is silent for minutes. Compilers are
processes that the scheduler starts: while these compute, the engine does not hang. The schedulers' own
processor time proves nothing, as ranks in a deadlock spin.

A large model loads for minutes, and kernels are compiled for minutes: both take processor time. A process
that waits forever for a device or another rank may take it too, hence the limit for the whole start.
`SGLangRun.lose` (app.engine.sglang.run) ends an engine that was found hanging.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from app.engine.sglang.process_work import UNSEEN, Work, has_computed
from app.errors import EngineFailed

PATIENCE = 3
LOOKS = 8
"""Looks of a watchdog within its limit."""
MAX_LOOK_S = 5.0
MIN_BYTES = 1 << 20
"""Bytes read or written that count; the messages between threads are far fewer."""
END_S = 30.0
"""Seconds to await the end of a start that was given up: SGLang looks at its processes every 5 s."""

T = TypeVar("T")


class Progress(NamedTuple):
    """The progress of an engine: open choices, batches of output so far, its load."""

    open_choices: int
    batches: int
    load: Any


class _Looks:
    """Looks at what is watched, `LOOKS` within the shortest of some limits in seconds, of which 0 is none."""

    def __init__(self, clock_s: Callable[[], float], *limits_s: float) -> None:
        self._clock_s = clock_s
        self.interval_s = min([MAX_LOOK_S, *(limit_s / LOOKS for limit_s in limits_s if limit_s)])
        self._looked_s = clock_s()

    def _begin_look(self) -> tuple[float, bool]:
        """The time of a look, and whether it is so late that this process itself stood still meanwhile."""
        now_s = self._clock_s()
        is_late = now_s - self._looked_s > 2 * self.interval_s
        self._looked_s = now_s
        return now_s, is_late


class HangWatchdog(_Looks):
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
        super().__init__(clock_s, hang_s)
        self._hang_s = hang_s
        self._progress = progress
        self._on_hang = on_hang
        self._output_s = self._load_s = self._looked_s
        self._last = Progress(0, 0, None)
        self._compiled_s = compiled_s
        self._compiled: tuple[float, float] | None = None
        """The first reading of the compilers' processor time in this silence: when, and how much."""

    @property
    def is_silent(self) -> bool:
        """True if looks have seen no output for half the limit, so that compilers count."""
        return self._clock_s() - self._output_s >= self._hang_s / 2

    async def run(self) -> None:
        """Look until the engine hangs."""
        compiled_s = None
        while not self.look(compiled_s):  # silence is no event
            await asyncio.sleep(self.interval_s)
            compiled_s = await asyncio.to_thread(self._compiled_s) if self.is_silent else None

    def look(self, compiled_s: float | None) -> bool:
        """Look once; True if the engine hangs. `compiled_s` is None where it was not measured."""
        now_s, is_late = self._begin_look()  # after a late one, the engine's output has not been read yet
        seen = self._progress()
        is_idle = not seen.open_choices or not self._last.open_choices
        if is_late or is_idle or seen.batches != self._last.batches:
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
        """True if compilers have computed in a silence of half the limit."""
        if now_s - self._output_s < self._hang_s / 2 or compiled_s is None:
            self._compiled = None
            return False
        if self._compiled is None:
            self._compiled = now_s, compiled_s
        first_s, first = self._compiled
        return has_computed(compiled_s - first, now_s - first_s)


class StartWatchdog(_Looks):
    """Watches one start; `idle_s` and `longest_s` are its limits in seconds, and 0 is none."""

    def __init__(
        self,
        idle_s: float,
        longest_s: float,
        work: Callable[[], Work],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(clock_s, idle_s, longest_s)
        self._idle_s = idle_s
        self._longest_s = longest_s
        self._work = work
        self._began_s = self._worked_s = self._looked_s
        self._last = UNSEEN

    async def run(self) -> str:
        """Look until the start hangs; the reason."""
        while (reason := self.look(await asyncio.to_thread(self._work_seen))) is None:  # noqa: ASYNC110
            await asyncio.sleep(self.interval_s)
        return reason

    def _work_seen(self) -> Work:
        # Not every container shows processes, nor every kernel what they read: a look must not end a start.
        with contextlib.suppress(Exception):
            return self._work()
        return UNSEEN

    def look(self, work: Work) -> str | None:
        """Look once; the reason for which the start hangs.

        Without processes nothing is idle; the limit for the whole start holds.
        """
        now_s, is_late = self._begin_look()  # after a late one, the others may have stood still too
        if is_late or not work.pids or self._has_worked(work, now_s - self._worked_s):
            self._worked_s, self._last = now_s, work
        idle_s = now_s - self._worked_s
        if self._idle_s and idle_s >= self._idle_s:
            return f"its processes have done nothing for {idle_s:.1f} s"
        took_s = now_s - self._began_s
        return f"it has taken {took_s:.1f} s" if self._longest_s and took_s >= self._longest_s else None

    def _has_worked(self, work: Work, since_s: float) -> bool:
        """True if more was done since the last time than by processes that wait."""
        cpu_s, num_bytes = work.cpu_s - self._last.cpu_s, work.num_bytes - self._last.num_bytes
        moved = num_bytes >= MIN_BYTES
        return moved or has_computed(cpu_s, since_s) or work.pids != self._last.pids


async def watched(starting: Coroutine[Any, Any, T], watchdog: StartWatchdog) -> T:
    """Await a start, and cancel it when it hangs. Raises EngineFailed then, and what the start raises."""
    start = asyncio.ensure_future(starting)
    looking = asyncio.create_task(watchdog.run(), name="engine start watchdog")
    try:
        await asyncio.wait({start, looking}, return_when=asyncio.FIRST_COMPLETED)
        if start.done():
            return start.result()
        start.cancel()
        await asyncio.wait({start}, timeout=END_S)
        raise EngineFailed(f"the start hangs: {looking.result()}")
    finally:
        looking.cancel()
        if not start.done() and not start.cancelling():  # twice would cut short what frees its processes
            start.cancel()
            await asyncio.wait({start}, timeout=END_S)
