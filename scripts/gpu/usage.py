"""How busy the GPUs are, as `nvidia-smi` says it several times a second while something runs."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

QUERY = ("utilization.gpu", "memory.used", "power.draw")
INTERVAL_MS = 200
END_S = 5.0


@dataclass(slots=True)
class GpuUse:
    """Means over the samples and GPUs; NaN where there is no `nvidia-smi`."""

    samples: int = 0
    busy_percent: float = float("nan")
    busiest_percent: float = float("nan")
    memory_mib: float = float("nan")
    power_w: float = float("nan")


def read(lines: Sequence[str]) -> GpuUse:
    """The use of the GPUs from `nvidia-smi`'s lines; those without numbers are left out."""
    rows = []
    for line in lines:
        with contextlib.suppress(ValueError):
            row = [float(cell) for cell in line.split(",")]
            if len(row) == len(QUERY):
                rows.append(row)
    if not rows:
        return GpuUse()
    busy, memory, power = zip(*rows, strict=True)
    count = len(rows)
    return GpuUse(count, sum(busy) / count, max(busy), max(memory), sum(power) / count)


@contextlib.contextmanager
def sampled() -> Iterator[GpuUse]:
    """Sample while the block runs; the result is complete once it has ended."""
    use = GpuUse()
    tool = shutil.which("nvidia-smi")
    if tool is None:
        yield use
        return
    command = [tool, f"--query-gpu={','.join(QUERY)}", "--format=csv,noheader,nounits"]
    process = subprocess.Popen(
        [*command, f"-lms={INTERVAL_MS}"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        yield use
    finally:
        process.terminate()
        try:
            printed, _ = process.communicate(timeout=END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            printed, _ = process.communicate()
        reading = read(printed.splitlines())
        for name in GpuUse.__slots__:
            setattr(use, name, getattr(reading, name))
