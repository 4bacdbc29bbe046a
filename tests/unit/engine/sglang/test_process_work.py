"""The stage of a start by the names of its processes, and the processor time of those."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import psutil
import pytest

from app.engine.sglang.process_work import COMPILE, IMPORT, LOAD, stage_by_names, started_cpu_s


@pytest.mark.parametrize(
    ("names", "stage"),
    [
        ([], IMPORT),
        (["python"], IMPORT),
        (["python", "sglang::schedul"], LOAD),
        (["sglang::scheduler_TP0", "sglang::detoken"], LOAD),
        (["sglang::schedul", "ninja", "cicc"], COMPILE),
    ],
)
def test_the_stage_is_told_by_names(names: list[str], stage: str) -> None:
    """A scheduler takes its title when its imports are done; compilers are its children."""
    assert stage_by_names(names) == stage


def test_the_time_of_what_a_process_has_started_counts_and_its_own_does_not() -> None:
    """Also once the compiler has ended, and that of a compiler's own children."""
    spin = "import time\nend = time.process_time() + 0.2\nwhile time.process_time() < end: pass\n"
    run = f"import subprocess, sys; subprocess.run([sys.executable, '-S', '-c', {spin!r}])"
    code = f"{spin}print(flush=True)\ninput()\n{run}\nprint(flush=True)\ninput()"
    with subprocess.Popen(
        [sys.executable, "-S", "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.readline()
        assert sum(psutil.Process(process.pid).cpu_times()[:2]) > 0.15
        assert started_cpu_s([process.pid]) == 0.0
        print(file=process.stdin, flush=True)
        process.stdout.readline()
        assert started_cpu_s([process.pid, 2**22 + 1]) > 0.15
        process.communicate("\n")


def test_the_table_of_processes_is_read_once_for_all_schedulers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight schedulers on a host of 3,000 processes read it eight times before, 0.5 s on the event loop."""
    reads: list[int] = []
    processes = psutil.process_iter

    def process_iter(attrs: list[str]) -> Iterator[psutil.Process]:
        reads.append(1)
        return processes(attrs)

    monkeypatch.setattr(psutil, "process_iter", process_iter)
    assert started_cpu_s(range(2**22 + 1, 2**22 + 9)) == 0.0
    assert reads == [1]
