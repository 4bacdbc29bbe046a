"""The check of a running server: whether its event loop, and not the engine, limits the node."""

from __future__ import annotations

import os
import time

import psutil

from app.doctor.subject import Finding, Subject, not_applicable, ok, warning
from app.store.opening import holder

WATCH_S = 1.0
MAX_SHARE = 0.85
"""Share of a core above which bursts already wait for the loop."""


def event_loop(subject: Subject) -> Finding:
    """The share of a core that the event loop of the server on the data directory uses."""
    server = holder(subject.settings.data_dir)
    if subject.starting or server is None or not server.pid or server.pid == os.getpid():
        return not_applicable("no server runs on the data directory")
    before_s = main_thread_s(server.pid)
    time.sleep(WATCH_S)
    share = (main_thread_s(server.pid) - before_s) / WATCH_S
    detail = f"the event loop of process {server.pid} uses {share:.0%} of a core"
    if share < MAX_SHARE:
        return ok(detail)
    return warning(
        f"{detail}: it limits this node, not the engine",
        "see docs/sizing.md#when-the-event-loop-limits-the-node",
    )


def main_thread_s(pid: int) -> float:
    """CPU seconds of a process's main thread, which has the event loop; 0 where it cannot be seen."""
    try:
        return sum(t.user_time + t.system_time for t in psutil.Process(pid).threads() if t.id == pid)
    except psutil.Error:
        return 0.0
