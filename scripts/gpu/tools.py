"""A tool of scripts/ or pytest, run by a stage: its lines as they come, and an end within the limit."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from scripts.benchmarks.machine import ROOT

END_S = 15.0
"""Seconds that a tool has to write what it found, once it is told to end."""


class ToolFailed(RuntimeError):
    """A tool ended in another way than it should have, or not in time."""


def run_tool(
    arguments: Sequence[str],
    limit_s: float,
    log: Path,
    *,
    on_line: Callable[[str], None] = lambda _line: None,
    env: Mapping[str, str] | None = None,
    statuses: Sequence[int] = (0, 1),
) -> str:
    """Run `python ARGUMENTS`; what it printed. `on_line` gets each line of both streams.

    Raises ToolFailed with the end of its log where it ran past the limit, or ended with another status.
    """
    environment = {**os.environ, **(env or {})}
    printed: list[str] = []
    with log.open("w") as kept:
        process = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=ROOT,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        out, err = process.stdout, process.stderr
        assert out is not None
        assert err is not None

        def read(stream: IO[str], lines: list[str]) -> None:
            with stream:
                for line in stream:
                    lines.append(line)
                    kept.write(line)
                    kept.flush()
                    on_line(line.rstrip("\n"))

        readers = [
            threading.Thread(target=read, args=(stream, lines), daemon=True)
            for stream, lines in ((out, printed), (err, []))
        ]
        for reader in readers:
            reader.start()
        try:
            ended = has_ended(process, limit_s - END_S)
        finally:
            if process.poll() is None:
                process.terminate()
                has_ended(process, END_S)
            if process.poll() is None:
                process.kill()
                process.wait()
            for reader in readers:  # one that a process of the tool's keeps open is given up
                reader.join(1.0)
    if not ended or process.returncode not in statuses:
        how = f"ended with status {process.returncode}" if ended else f"ran past {limit_s:.0f} s"
        raise ToolFailed(f"python {' '.join(arguments)[:300]} {how}:\n{_tail(log)}")
    return "".join(printed)


def has_ended(process: subprocess.Popen[Any], limit_s: float) -> bool:
    """Whether it ended within its limit."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(max(0.1, limit_s))
        return True
    return False


def _tail(log: Path) -> str:
    return log.read_text(errors="replace")[-3000:]
