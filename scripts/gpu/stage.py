"""One stage of a check, as a process of its own: `python -m scripts.gpu.stage OUT NAME WORK LIMIT_S`.

What it found so far is in the state whenever it is ended. It ends with whoever started it.
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from app.engine.parent_death import die_with_parent
from scripts.gpu import bench, contract, kill, load, machine, paths, start
from scripts.gpu.state import Checkup, State

RUNS: dict[str, Callable[[Checkup], None]] = {
    "machine": machine.run,
    "paths": paths.run,
    "start": start.run,
    "contract": contract.run,
    "kill": kill.run,
    "load": load.run,
    "bench": bench.run,
}
ERROR_CHARS = 4000
"""The end of a traceback that is kept; a server's last 3,000 characters of log are among them."""


def main() -> int:
    """Run the stage; 0 whatever it found, 1 where it could not come to its end."""
    out, name, work, limit_s = sys.argv[1:]
    die_with_parent(os.getppid())
    signal.signal(signal.SIGTERM, _terminated)
    state = State.load(Path(out))
    check = Checkup(state, name, Path(work), float(limit_s))
    try:
        RUNS[name](check)
    except Exception:  # noqa: BLE001  # whatever it is goes into the report, and the next stage follows
        check.record.error = traceback.format_exc()[-ERROR_CHARS:]
        state.save()
        return 1
    return 0


def _terminated(signum: int, _frame: object) -> NoReturn:
    """SIGTERM ends a stage as an exception would, so that it stops what it started."""
    raise SystemExit(128 + signum)


if __name__ == "__main__":
    sys.exit(main())
