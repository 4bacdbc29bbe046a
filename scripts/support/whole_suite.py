"""The whole test suite: two halves at once, then by itself what is judged by the clock.

The halves are the tests that start real SGLang, and all others: starting SGLang takes a core for a quarter of
a minute, again and again, while the others often wait. These are shown as they run; what the first half says
is kept until they are through, so that both can be read. A test whose verdict is a time or a rate (marked
`timed`) is in neither: it runs after both have ended, with the machine to itself.
At the end, for each of the three: its ten slowest tests, and one line for each reason for which tests were
skipped.

Not pytest-xdist: two workers took 26 s instead of 44 s for 453 of the tests without SGLang, for 1.6 times the
CPU time. Beside the other half there is no second core: at each start two processes import SGLang at once.
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


NUM_SLOWEST = 10
PYTEST = (sys.executable, "-m", "pytest")
# The other half keeps the failures for --lf: two would overwrite each other's.
SGLANG = Stage("with real SGLang", (*PYTEST, "-m", "sglang and not timed", "-p", "no:cacheprovider"))
OTHERS = Stage("without SGLang", (*PYTEST, "-m", "not sglang and not timed"))
TIMED = Stage("of times and rates", (*PYTEST, "-m", "timed"))


def run(kept: Stage, shown: Stage, alone: Stage) -> int:
    """Run two at once and the third after them; 0 when all passed. What `kept` says follows `shown`.

    The third is not started when the suite was interrupted.
    """
    began_s = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    interrupted = threading.Event()
    _leave_stopping_to(running, interrupted)
    with (
        tempfile.TemporaryDirectory(prefix="tokenring-suite-") as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
    ):
        reports = {stage: Path(folder, f"{number}.xml") for number, stage in enumerate((shown, kept, alone))}

        def start(stage: Stage, stdout: IO[str] | None = None) -> subprocess.Popen[bytes]:
            command = [*stage.command, f"--junit-xml={reports[stage]}"]
            stderr = None if stdout is None else subprocess.STDOUT
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr)
            running.append(process)
            return process

        halves = {kept: start(kept, output), shown: start(shown)}
        passed = {stage: halves[stage].wait() == 0 for stage in (shown, kept)}
        output.seek(0)
        print(f"\n==== the tests {kept.name} ====", output.read(), sep="\n")
        print(f"==== the tests {alone.name} ====", flush=True)
        passed[alone] = not interrupted.is_set() and start(alone).wait() == 0
        for stage, path in reports.items():
            print(*summary(stage, path), sep="\n")
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
    sys.exit(run(SGLANG, OTHERS, TIMED))
