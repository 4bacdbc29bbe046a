"""A child process that ends with the process that started it, and leaves no process running."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import traceback
from collections.abc import Callable
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process as soon as `parent` ends, which started it; end at once if it has."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before it was asked for
        os._exit(1)


def run_and_exit(run: Callable[[], int]) -> NoReturn:
    """End this process with the status that `run` returns, or with its traceback and status 1.

    It waits for no thread, and for no process that was started: this one's parent ends those.
    """
    status = 1
    try:
        status = run()
    except Exception:  # noqa: BLE001  # the process ends: the last chance to report the reason
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)
