"""The load of the event loop over the last 10 s: CPU that its thread used, and delay of what was due."""

from __future__ import annotations

import asyncio
import time
from collections import deque

POLL_S = 0.5


class LoopMeter:
    """Reads the clocks of the loop's thread twice a second."""

    def __init__(self) -> None:
        self._polls = deque([(time.monotonic(), time.thread_time(), 0.0)], maxlen=21)
        """Of each poll the time, the CPU time of the thread, and the delay, all in seconds."""

    async def run(self) -> None:
        """Poll for ever, in the loop that is measured."""
        while True:
            due_s = time.monotonic() + POLL_S
            await asyncio.sleep(POLL_S)
            self.poll(time.monotonic(), time.thread_time(), due_s)

    def poll(self, at_s: float, cpu_s: float, due_s: float) -> None:
        """Take both clocks, at a time that was due at `due_s`."""
        self._polls.append((at_s, cpu_s, max(0.0, at_s - due_s)))

    @property
    def core_share(self) -> float:
        """Share of one core that the thread used, 0 to 1; 0 before the first poll."""
        (first_s, first_cpu_s, _), (last_s, last_cpu_s, _) = self._polls[0], self._polls[-1]
        return (last_cpu_s - first_cpu_s) / (last_s - first_s) if last_s > first_s else 0.0

    @property
    def lag_s(self) -> float:
        """The longest delay of a poll, in seconds."""
        return max(lag_s for _, _, lag_s in self._polls)
