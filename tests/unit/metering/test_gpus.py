"""Readings of nvidia-smi, by a script in its place: what is shown, for how long, and that nothing hangs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.metering.gpus import STALE_S, Gpus
from tests.support.sse_client import until

WORKS = "echo '0, 87, 70000, 81559, 612.34'; echo '1, 3, 512, 81559, [N/A]'; echo nonsense"


class Bench:
    """The readings of a script, on a clock that a test turns."""

    def __init__(self, folder: Path) -> None:
        self.now_s = 0.0
        self._script, self._pid = folder / "nvidia-smi", folder / "pid"
        self.gpus = Gpus((str(self._script),), lambda: self.now_s)
        self.running: asyncio.Task[None] | None = None

    def start(self, script: str) -> None:
        """Read what a script prints; it goes on for a minute then."""
        self._script.write_text(f"#!/bin/sh\n{script}\necho $$ > {self._pid}\nexec sleep 60\n")
        self._script.chmod(0o700)
        self.running = asyncio.create_task(self.gpus.run())

    async def printed(self) -> int:
        """Wait until the script has printed all; its process."""
        await until(lambda: self._pid.exists() and self._pid.read_text().endswith("\n"))
        return int(self._pid.read_text())

    async def stop(self) -> None:
        """Cancel the reading."""
        if self.running is not None:
            self.running.cancel()
            await asyncio.wait([self.running])


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Bench]:
    """One for a test."""
    made = Bench(tmp_path)
    yield made
    await made.stop()


async def test_each_gpu_has_its_readings(bench: Bench) -> None:
    """In shares, bytes and watts; what a GPU does not report is left out, as is a line that is none."""
    bench.start(WORKS)
    await until(lambda: len(bench.gpus.utilization) == 2)
    assert bench.gpus.utilization == {"0": 0.87, "1": 0.03}
    assert bench.gpus.used_bytes["1"] == 512 * 1024**2
    assert bench.gpus.total_bytes["0"] == 81_559 * 1024**2
    assert bench.gpus.power_w == {"0": 612.34}


async def test_a_reading_goes_stale(bench: Bench) -> None:
    """Where nvidia-smi hangs, old numbers are not shown as new ones."""
    bench.start(WORKS)
    await until(lambda: bool(bench.gpus.utilization))
    bench.now_s = STALE_S + 1
    assert bench.gpus.utilization == {}


async def test_the_process_ends_with_the_server(bench: Bench) -> None:
    """One that says nothing, and would not end by itself, is killed."""
    bench.start("")
    pid = await bench.printed()
    await bench.stop()
    await until(lambda: not Path(f"/proc/{pid}").exists() or zombie(pid))
    assert bench.gpus.utilization == {}


def zombie(pid: int) -> bool:
    """A process that has ended, and whose parent has not looked yet."""
    return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()


@pytest.mark.parametrize("script", ["head -c 200000 /dev/zero", "exit 9"])
async def test_output_without_sense_ends_the_reading(bench: Bench, script: str) -> None:
    """A line without an end, and an nvidia-smi that finds no driver, are no error of the server."""
    bench.start(script)
    assert bench.running is not None
    await asyncio.wait_for(bench.running, 10)
    assert bench.gpus.utilization == {}


async def test_what_cannot_be_run_is_nothing(tmp_path: Path) -> None:
    """A program of another machine, as in an image for one with GPUs."""
    program = tmp_path / "nvidia-smi"
    program.write_bytes(b"\x7fELF" + bytes(60))
    program.chmod(0o700)
    gpus = Gpus((str(program),))
    await gpus.run()
    assert gpus.utilization == {}


async def test_without_nvidia_smi_there_is_nothing(tmp_path: Path) -> None:
    """On a machine without a GPU the reading ends at once."""
    gpus = Gpus((str(tmp_path / "absent"),))
    await gpus.run()
    assert gpus.power_w == {}
