"""Time as it passes for the program under test, whatever else the machine has to do."""

import time
from pathlib import Path

_WAITED = Path("/proc/thread-self/schedstat")


def unhindered_s() -> float:
    """Monotonic seconds, less those in which this thread could have run and another program did (Linux)."""
    waited_ns = int(_WAITED.read_text().split()[1]) if _WAITED.exists() else 0
    return time.monotonic() - waited_ns / 1e9
