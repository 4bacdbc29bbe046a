"""The whole test suite: three thirds at once, then by itself what is judged by the clock.

The thirds are the tests that start real SGLang, those of whole servers (`tests/e2e`, `tests/fault`), which
mostly wait, and all others. Starting SGLang takes a core for half a minute, again and again; the waiting of
one third is the time of another. The first third is shown as it runs; the output of the others is kept until
it is through, so that all can be read. A test whose verdict is a time or a rate (marked `timed`) is in none
of them: it runs after all have ended, with the machine to itself. One that fails there is measured again, up
to twice: a fault of the program is there each time, a machine that paused is not. Its first failure is shown.
At the end, for each of the four: its ten slowest tests, and one line for each reason for which tests were
skipped.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, NamedTuple
from xml.etree import ElementTree as ET


class Stage(NamedTuple):
    """Tests that run one after another, and how they are called."""

    name: str
    command: tuple[str, ...]


def marked(mark: str) -> list[str]:
    """The test files that use the mark, or their folder where a conftest.py does.

    To collect all ten thousand tests takes half a minute of CPU, and two stages need few of them.
    """
    uses = [path for path in sorted(Path("tests").rglob("*.py")) if f"mark.{mark}" in path.read_text("utf-8")]
    return [str(path.parent if path.name == "conftest.py" else path) for path in uses]


NUM_SLOWEST = 10
PYTEST = (sys.executable, "-m", "pytest")
WHOLE_SERVERS = ("tests/e2e", "tests/fault")
# One of them keeps the failures for --lf: two would overwrite each other's.
KEPT = ("-p", "no:cacheprovider")
SGLANG = Stage("with real SGLang", (*PYTEST, *marked("sglang"), "-m", "sglang and not timed", *KEPT))
SERVERS = Stage("of whole servers", (*PYTEST, *WHOLE_SERVERS, "-m", "not sglang and not timed", *KEPT))
OTHERS = Stage(
    "of the rest",
    (*PYTEST, *(f"--ignore={folder}" for folder in WHOLE_SERVERS), "-m", "not sglang and not timed"),
)
TIMED = Stage("of times and rates", (*PYTEST, *marked("timed"), "-m", "timed"))
NUM_MEASUREMENTS = 3
"""How often a test of a time or a rate may be run until it passes."""


def run(shown: Stage, kept: Sequence[Stage], alone: Stage) -> int:
    """Run all but `alone` at once, then that; 0 when all passed. What `kept` say follows `shown`.

    `alone` is not started when the suite was interrupted.
    """
    began_s = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    interrupted = threading.Event()
    _leave_stopping_to(running, interrupted)
    with tempfile.TemporaryDirectory(prefix="tokenring-suite-") as folder:

        def path_of(stage: Stage, suffix: str) -> Path:
            return Path(folder, stage.name + suffix)

        def start(stage: Stage, stdout: IO[str] | None = None) -> subprocess.Popen[bytes]:
            command = [*stage.command, f"--junit-xml={path_of(stage, '.xml')}"]
            stderr = None if stdout is None else subprocess.STDOUT
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
            running.append(process)
            return process

        processes = {}
        for stage in kept:
            with path_of(stage, ".txt").open("w") as output:
                processes[stage] = start(stage, output)
        processes[shown] = start(shown)
        passed = {shown: processes[shown].wait() == 0}
        for stage in kept:
            passed[stage] = processes[stage].wait() == 0
            output_text = path_of(stage, ".txt").read_text("utf-8", "replace")
            print(f"\n==== the tests {stage.name} ====", output_text, sep="\n", flush=True)
        print(f"==== the tests {alone.name} ====", flush=True)
        passed[alone] = not interrupted.is_set() and start(alone).wait() == 0
        for measurement in range(2, NUM_MEASUREMENTS + 1):
            if passed[alone] or interrupted.is_set():
                break
            print(f"==== what failed of the tests {alone.name}, measurement {measurement} ====", flush=True)
            failed = Stage(f"{alone.name}, measurement {measurement}", (*alone.command, "--last-failed"))
            passed[alone] = start(failed).wait() == 0
        for stage in passed:
            print(*summary(stage, path_of(stage, ".xml")), sep="\n")
    print(f"the whole suite took {time.monotonic() - began_s:.0f} s")
    for stage, has_passed in passed.items():
        print(f"the tests {stage.name}: {'passed' if has_passed else 'failed'}", flush=True)
    return int(not all(passed.values()))


def summary(stage: Stage, report: Path) -> Iterator[str]:
    """Lines about the stage's slowest tests and its skipped ones, from pytest's JUnit report."""
    try:
        cases = list(ET.parse(report).iter("testcase"))  # noqa: S314  # written by our own pytest
    except (OSError, ET.ParseError):
        yield f"the tests {stage.name} left no report: they were ended before it"
        return
    cases.sort(key=lambda case: -float(case.get("time", 0)))
    yield f"slowest of the {len(cases)} tests {stage.name}:"
    for case in cases[:NUM_SLOWEST]:
        yield f"{float(case.get('time', 0)):8.1f} s  {case.get('classname')}::{case.get('name')}"
    skipped = Counter(str(mark.get("message")) for case in cases for mark in case.iter("skipped"))
    for reason, num_tests in skipped.items():
        yield f"SKIPPED {num_tests} of the tests {stage.name}: {reason}"


def _leave_stopping_to(stages: Sequence[subprocess.Popen[bytes]], interrupted: threading.Event) -> None:
    """Let them tell their end: a terminal's Ctrl-C reaches them by itself, SIGTERM becomes one."""

    def interrupt(signum: int, _frame: object) -> None:
        interrupted.set()
        if signum == signal.SIGTERM:
            for stage in stages:
                stage.send_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, interrupt)
    signal.signal(signal.SIGTERM, interrupt)


if __name__ == "__main__":
    sys.exit(run(OTHERS, (SERVERS, SGLANG), TIMED))
