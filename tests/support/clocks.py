"""Time as it passes for the program under test, whatever else the machine has to do."""

import time
from pathlib import Path


def unhindered_s(pid: int | None = None) -> float:
    """Monotonic seconds, less those in which this thread could have run and another program did (Linux).

    With a process, less those of its main thread too.
    """
    threads = [Path("/proc/thread-self/schedstat"), *([Path(f"/proc/{pid}/schedstat")] if pid else [])]
    waited_ns = sum(int(thread.read_text().split()[1]) for thread in threads if thread.exists())
    return time.monotonic() - waited_ns / 1e9
