"""The whole test suite in two processes at once: the tests that start real SGLang, and all others.

Starting SGLang takes a core for a quarter of a minute, again and again, while the others often wait. These
are shown as they run; what the first half says is kept until they are through, so that both can be read.

Not pytest-xdist as yet: two workers took 26 s instead of 44 s for 453 of the tests without SGLang, and 1.6
times the CPU time. It was not measured beside the other half, which has several engines and needs one core
of two.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import NamedTuple


class Half(NamedTuple):
    """Tests that run one after another, and how they are called."""

    name: str
    command: Sequence[str]


PYTEST = (sys.executable, "-m", "pytest", "--durations=10")
# The other half keeps the failures for --lf: two would overwrite each other's.
SGLANG = Half("with real SGLang", (*PYTEST, "-m", "sglang", "-p", "no:cacheprovider"))
OTHERS = Half("without SGLang", (*PYTEST, "-m", "not sglang"))


def run(kept: Half, shown: Half) -> int:
    """Run both; 0 when both passed. What `kept` says comes when `shown` has ended."""
    began_s = time.monotonic()
    running: list[subprocess.Popen[bytes]] = []
    _leave_stopping_to(running)
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
        running += [
            subprocess.Popen(kept.command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT)
        ]
        running += [subprocess.Popen(shown.command, stdin=subprocess.DEVNULL)]
        failed = [process.wait() != 0 for process in running[::-1]]
        output.seek(0)
        print(f"\n==== the tests {kept.name} ====", output.read(), sep="\n")
    print(f"the whole suite took {time.monotonic() - began_s:.0f} s")
    for half, has_failed in zip((shown, kept), failed, strict=True):
        print(f"the tests {half.name}: {'failed' if has_failed else 'passed'}", flush=True)
    return int(any(failed))


def _leave_stopping_to(halves: Sequence[subprocess.Popen[bytes]]) -> None:
    """Let them tell their end: a terminal's Ctrl-C reaches them by itself, SIGTERM becomes one."""

    def interrupt(_signum: int, _frame: object) -> None:
        for half in halves:
            half.send_signal(signal.SIGINT)

    signal.signal(signal.SIGINT, lambda _signum, _frame: None)
    signal.signal(signal.SIGTERM, interrupt)


if __name__ == "__main__":
    sys.exit(run(SGLANG, OTHERS))
