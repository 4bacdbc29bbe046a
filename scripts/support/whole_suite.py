"""The whole test suite in two processes at once: the tests that start real SGLang, and all others.

Starting SGLang takes a core for a quarter of a minute, again and again, while the others often wait. These
are shown as they run; what the first half says is kept until they are through, so that both can be read.
At the end, for each half: its ten slowest tests, and one line for each reason for which tests were skipped.

Not pytest-xdist: two workers took 26 s instead of 44 s for 453 of the tests without SGLang, for 1.6 times the
CPU time. Beside the other half there is no second core: at each start two processes import SGLang at once.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree as ET


class Half(NamedTuple):
    """Tests that run one after another, and how they are called."""

    name: str
    command: Sequence[str]


NUM_SLOWEST = 10
PYTEST = (sys.executable, "-m", "pytest")
# The other half keeps the failures for --lf: two would overwrite each other's.
SGLANG = Half("with real SGLang", (*PYTEST, "-m", "sglang", "-p", "no:cacheprovider"))
OTHERS = Half("without SGLang", (*PYTEST, "-m", "not sglang"))


def run(kept: Half, shown: Half) -> int:
    """Run both; 0 when both passed. What `kept` says comes when `shown` has ended."""
    began_s = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    _leave_stopping_to(running)
    with (
        tempfile.TemporaryDirectory(prefix="tokenring-suite-") as folder,
        tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output,
    ):
        reports = [Path(folder, name) for name in ("kept.xml", "shown.xml")]
        commands = [
            [*half.command, f"--junit-xml={path}"] for half, path in zip((kept, shown), reports, strict=True)
        ]
        running += [
            subprocess.Popen(commands[0], stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        ]
        running += [subprocess.Popen(commands[1], stdin=subprocess.DEVNULL)]
        failed = [process.wait() != 0 for process in running[::-1]]
        output.seek(0)
        print(f"\n==== the tests {kept.name} ====", output.read(), sep="\n")
        for half, path in ((shown, reports[1]), (kept, reports[0])):
            print(*summary(half, path), sep="\n")
    print(f"the whole suite took {time.monotonic() - began_s:.0f} s")
    for half, has_failed in zip((shown, kept), failed, strict=True):
        print(f"the tests {half.name}: {'failed' if has_failed else 'passed'}", flush=True)
    return int(any(failed))


def summary(half: Half, report: Path) -> Iterator[str]:
    """Lines about the half's slowest tests and its skipped ones, from pytest's JUnit report."""
    try:
        cases = list(ET.parse(report).iter("testcase"))  # noqa: S314  # written by our own pytest
    except (OSError, ET.ParseError):
        yield f"the tests {half.name} left no report: they were ended before it"
        return
    cases.sort(key=lambda case: -float(case.get("time", 0)))
    yield f"slowest of the {len(cases)} tests {half.name}:"
    for case in cases[:NUM_SLOWEST]:
        yield f"{float(case.get('time', 0)):8.1f} s  {case.get('classname')}::{case.get('name')}"
    skipped = Counter(str(mark.get("message")) for case in cases for mark in case.iter("skipped"))
    for reason, num_tests in skipped.items():
        yield f"SKIPPED {num_tests} of the tests {half.name}: {reason}"


def _leave_stopping_to(halves: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let them tell their end: a terminal's Ctrl-C reaches them by itself, SIGTERM becomes one."""

    def interrupt(_signum: int, _frame: object) -> None:
        for half in halves:
            half.send_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, lambda _signum, _frame: None)
    signal.signal(signal.SIGTERM, interrupt)


if __name__ == "__main__":
    sys.exit(run(SGLANG, OTHERS))
