"""What a server holds of the machine, and the processes of its engine."""

from __future__ import annotations

from pathlib import Path

import psutil

ENGINE_PROCESSES = ("scheduler", "detokenizer")


def process_of(server_pid: int, name: str) -> int | None:
    """The id of the engine's process of that kind; None while there is none."""
    try:
        children = psutil.Process(server_pid).children(recursive=True)
        return next((child.pid for child in children if name in child.name()), None)
    except psutil.NoSuchProcess:
        return None


def held(pid: int) -> dict[str, int]:
    """What the server holds of the machine."""
    process = psutil.Process(pid)
    children = process.children(recursive=True)
    return {
        "descriptors": process.num_fds(),
        "threads": process.num_threads(),
        "rss_mb": process.memory_info().rss >> 20,
        "children": len(children),
        "zombies": sum(child.status() == psutil.STATUS_ZOMBIE for child in children),
        "shared_memory_files": len(list(Path("/dev/shm").iterdir())),  # noqa: S108
    }
