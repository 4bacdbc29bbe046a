"""The table of checks, run side by side within a few seconds, and its findings as text and JSON."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

from app.doctor import front_process, machine, service
from app.doctor.subject import Finding, Subject, failure, gpus_of, later, warning
from app.settings import Settings

Check = Callable[[Subject], Finding]
Findings = Mapping[str, Finding]

CHECKS: Mapping[str, Check] = {
    "gpu": machine.gpu,
    "driver": machine.driver,
    "shared_memory": machine.shared_memory,
    "limits": machine.limits,
    "compilers": machine.compilers,
    "caches": machine.caches,
    "versions": service.versions,
    "model": service.model,
    "tp": service.tensor_parallel,
    "disk": service.disk,
    "port": service.port,
    "data_dir": service.data_folder,
    "prices": service.prices,
    "keys": service.keys,
    "policy": service.policy,
    "event_loop": front_process.event_loop,
}
MAX_CHECKS_S = 4.5
"""Seconds for all checks; a disk or a driver that hangs ends none of them."""


def examine(settings: Settings, *, starting: bool = False) -> Findings:
    """The findings of all checks, in the order of the table."""
    from app.engine.sglang.platform import find_compilers  # late, as in the checks

    environ = dict(os.environ)
    find_compilers(Path(sys.executable).parent, environ)  # as the server does before it starts SGLang
    subject = Subject(settings, environ, later(lambda: gpus_of(environ)), starting)
    return examined(subject)


def examined(
    subject: Subject, checks: Mapping[str, Check] = CHECKS, longest_s: float = MAX_CHECKS_S
) -> Findings:
    """The findings of `checks`; one that does not end in time, or breaks, says so."""
    ends_s = time.monotonic() + longest_s
    running = {name: later(partial(check, subject)) for name, check in checks.items()}
    return {name: _finding(future, ends_s) for name, future in running.items()}


def _finding(future: Future[Finding], ends_s: float) -> Finding:
    try:
        return future.result(max(0.0, ends_s - time.monotonic()))
    except TimeoutError:
        return warning("the check did not end in time", "see whether a disk or the driver hangs")
    except Exception as exc:  # noqa: BLE001  # a broken check is no reason to stop
        return warning(f"the check failed: {type(exc).__name__}: {exc}", "report it, please")


def unreadable(error: Exception) -> Finding:
    """The finding for settings that cannot be read."""
    return failure(str(error), "correct the setting; `tokenring settings` lists all of them")


def failures(findings: Findings) -> list[str]:
    """A line for each failure."""
    return [
        f"{name}: {finding.detail.rstrip('.')}. To do: {finding.advice}"
        for name, finding in findings.items()
        if finding.status == "failure"
    ]


def as_json(findings: Findings) -> dict[str, Any]:
    """The report as one object."""
    rows = [{"check": name, **finding._asdict()} for name, finding in findings.items()]
    return {"object": "doctor", "ok": not failures(findings), "findings": rows}
