"""Notices a start that makes no progress: its processes neither compute nor read, or it takes too long.

A large model loads for minutes, and kernels are compiled for minutes: both take processor time. A process
that waits in vain for a device or for another rank may take it too, hence the limit for the whole start.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

import psutil

from app.engine.sglang.watchdog import LONGEST_LOOK_S, LOOKS, has_computed, started_by
from app.errors import EngineFailed

LEAST_BYTES = 1 << 20
"""Bytes read or written that count; what threads tell one another is far less."""
END_S = 30.0
"""Seconds to await the end of a start that was given up: SGLang looks at its processes every 5 s."""

T = TypeVar("T")


class Work(NamedTuple):
    """The work of a start so far: its processes, their processor time, and the bytes that they moved."""

    pids: frozenset[int]
    cpu_s: float
    num_bytes: int


UNSEEN = Work(frozenset(), 0.0, 0)
"""Without processes nothing is idle; the limit for the whole start holds."""


class StartWatchdog:
    """Watches one start; `idle_s` and `longest_s` are its limits in seconds, and 0 is none."""

    def __init__(
        self,
        idle_s: float,
        longest_s: float,
        work: Callable[[], Work],
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._idle_s = idle_s
        self._longest_s = longest_s
        self._work = work
        self._clock_s = clock_s
        self.interval_s = min(*(limit / LOOKS for limit in (idle_s, longest_s) if limit), LONGEST_LOOK_S)
        self._began_s = self._looked_s = self._worked_s = clock_s()
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
        """Look once; the reason for which the start hangs."""
        now_s = self._clock_s()
        # When this process itself stood still, the others did so too.
        late = now_s - self._looked_s > 2 * self.interval_s
        self._looked_s = now_s
        if late or not work.pids or self._has_worked(work, now_s - self._worked_s):
            self._worked_s, self._last = now_s, work
        idle_s = now_s - self._worked_s
        if self._idle_s and idle_s >= self._idle_s:
            return f"its processes have done nothing for {idle_s:.1f} s"
        took_s = now_s - self._began_s
        return f"it has taken {took_s:.1f} s" if self._longest_s and took_s >= self._longest_s else None

    def _has_worked(self, work: Work, since_s: float) -> bool:
        """Whether more was done since the last time than by processes that wait."""
        cpu_s, num_bytes = work.cpu_s - self._last.cpu_s, work.num_bytes - self._last.num_bytes
        moved = num_bytes >= LEAST_BYTES
        return moved or has_computed(cpu_s, since_s) or work.pids != self._last.pids


class StartWork:
    """The work of what this process starts from now on, and of its threads whose names begin so."""

    def __init__(self, thread_name: str) -> None:
        self._process = psutil.Process()
        self._thread_name = thread_name
        self._older = set[int]()
        with contextlib.suppress(psutil.Error):  # then nothing is seen later either
            self._older.update(child.pid for child in self._process.children(recursive=True))

    def __call__(self) -> Work:
        """All of it so far; blocks, as `started_by` does."""
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
