"""How busy the GPUs are, as nvidia-smi says once in ten seconds.

It runs as a process beside the server: a driver that hangs stops it, and not the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from subprocess import DEVNULL, PIPE

INTERVAL_S = 10
STALE_S = 3 * INTERVAL_S
"""Seconds after which a reading is no longer shown."""
END_S = 1.0
"""Seconds that its end is waited for."""
MIB = 1024**2
FIELDS = ("utilization.gpu", "memory.used", "memory.total", "power.draw")
COMMAND = ("nvidia-smi", f"--query-gpu={','.join(('index', *FIELDS))}", "--format=csv,noheader,nounits")


class Gpus:
    """The last reading of each GPU of the machine; nothing where there is no nvidia-smi."""

    def __init__(
        self, command: Sequence[str] = COMMAND, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self._command, self._clock_s = command, clock_s
        self._read: dict[str, tuple[float, Sequence[float | None]]] = {}

    async def run(self) -> None:
        """Read until cancelled, or until nvidia-smi ends."""
        if shutil.which(self._command[0]) is None:
            return
        command = (*self._command, f"--loop={INTERVAL_S}")
        try:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=DEVNULL, stdout=PIPE, stderr=DEVNULL
            )
        except OSError:  # it cannot be run here
            return
        assert process.stdout is not None
        try:
            with contextlib.suppress(ValueError):  # a line without an end
                async for line in process.stdout:
                    self._take(line.decode(errors="replace"))
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            with contextlib.suppress(TimeoutError):  # one that hangs in the driver is left behind
                await asyncio.wait_for(process.wait(), END_S)

    def _take(self, line: str) -> None:
        index, *values = (value.strip() for value in line.split(","))
        if len(values) == len(FIELDS):
            self._read[index] = self._clock_s(), [_number(value) for value in values]

    def _values(self, field: int, factor: float) -> Mapping[str, float]:
        since_s = self._clock_s() - STALE_S
        fresh = {gpu: values[field] for gpu, (at_s, values) in self._read.items() if at_s >= since_s}
        return {gpu: value * factor for gpu, value in fresh.items() if value is not None}

    @property
    def utilization(self) -> Mapping[str, float]:
        """By GPU: the share of time in which a kernel ran."""
        return self._values(0, 0.01)

    @property
    def used_bytes(self) -> Mapping[str, float]:
        return self._values(1, MIB)

    @property
    def total_bytes(self) -> Mapping[str, float]:
        return self._values(2, MIB)

    @property
    def power_w(self) -> Mapping[str, float]:
        return self._values(3, 1.0)


def _number(text: str) -> float | None:
    """None for what a GPU does not report, as `[N/A]`."""
    with contextlib.suppress(ValueError):
        return float(text)
    return None
