"""Runs the stages of a check in order, each as a process with a limit, and ends what they leave behind."""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from scripts.benchmarks.machine import ROOT
from scripts.gpu import report
from scripts.gpu.state import StageRecord, State, Status
from scripts.gpu.tools import has_ended

LEAST_S: Mapping[str, float] = {
    "machine": 5,
    "paths": 10,
    "start": 60,
    "contract": 90,
    "kill": 90,
    "load": 90,
    "bench": 120,
}
"""The stages in their order, and the seconds without which one is not begun: about its longest start."""
GRACE_S = 20.0
"""Seconds of a stage's limit that are kept for its end: it stops servers, and a tool writes what it has."""
KILL_WAIT_S = 10.0
LOG_BYTES = 1 << 20
PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True, slots=True)
class Plan:
    """Which stages run, and for how long."""

    stages: Sequence[str]
    asked_for: bool
    """Whether the stages were named: then those that are finished run again."""
    stage_s: float
    budget_s: float


class Driver:
    """One run of a check. The state holds what earlier runs found."""

    def __init__(self, state: State, plan: Plan, entry: Sequence[str] = ("-m", "scripts.gpu.stage")) -> None:
        self._state = state
        self._plan = plan
        self._entry = entry
        self._began_s = time.monotonic()
        self._older = set(psutil.Process().children(recursive=True))
        self._work = Path(tempfile.mkdtemp(prefix="tokenring-gpu-"))

    def run(self) -> int:
        """Run what is to run; 1 where a stage did not pass."""
        try:
            for stage in self._plan.stages:
                self._one(stage)
        finally:
            end_all(self._older)
            report.write(self._state)
            shutil.rmtree(self._work, ignore_errors=True)
        statuses = [self._state.records[stage].status for stage in self._plan.stages]
        return int(any(status != "passed" for status in statuses))

    def _one(self, stage: str) -> None:
        if self._state.finished(stage) and not self._plan.asked_for:
            self._tell(f"{stage}: was finished before")
            return
        left_s = self._plan.budget_s - (time.monotonic() - self._began_s)
        if left_s < LEAST_S[stage] + GRACE_S:
            reason = f"{left_s:.0f} s are left of the budget; it needs {LEAST_S[stage] + GRACE_S:.0f} s"
            self._state.records[stage] = StageRecord("skipped", error=reason)
            self._tell(f"{stage}: skipped: {reason}")
        else:
            self._state.records.pop(stage, None)  # so that the order is that of the runs
            began_utc = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
            self._state.records[stage] = StageRecord(began_utc=began_utc)
            self._state.save()
            self._run(stage, min(self._plan.stage_s, left_s))
        self._state.save()
        report.write(self._state)

    def _run(self, stage: str, limit_s: float) -> None:
        """Run a stage to its end or its limit, then end what it left behind."""
        self._tell(f"{stage}: begins, {limit_s:.0f} s at most")
        work = self._work / stage
        work.mkdir()
        began_s = time.monotonic()
        command = [*self._entry, str(self._state.out), stage, str(work), str(limit_s - GRACE_S)]
        process = subprocess.Popen(
            [sys.executable, *command], cwd=ROOT, env=environment(self._work), start_new_session=True
        )
        try:
            ended = has_ended(process, limit_s - GRACE_S)
        finally:
            if process.poll() is None:
                process.terminate()
                has_ended(process, GRACE_S)
            end_all(self._older)
            process.wait()
            self._keep_logs(work)
        self._state = State.load(self._state.out)
        record = self._state.records[stage]
        record.seconds = round(time.monotonic() - began_s, 1)
        record.status = _status(record, ended, process.returncode)
        if not ended:
            record.error = f"it ran past its limit of {limit_s:.0f} s"
        self._tell(f"{stage}: {record.status} after {record.seconds:.0f} s{_last_line(record.error)}")

    def _keep_logs(self, work: Path) -> None:
        """Append the ends of a stage's logs to `logs.txt`: some machines return few files."""
        with (self._state.out / "logs.txt").open("ab") as kept:
            for log in sorted(work.rglob("*.log")):
                kept.write(f"=== {log.relative_to(self._work)}\n".encode() + log.read_bytes()[-LOG_BYTES:])

    def _tell(self, text: str) -> None:
        print(f"[{time.monotonic() - self._began_s:6.1f} s] {text}", flush=True)


def environment(work: Path) -> dict[str, str]:
    """The environment of a stage: the repository can be imported, and the product has a version."""
    folders = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    if not _is_installed():
        folders.append(str(_metadata(work)))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(folders), "PYTHONUNBUFFERED": "1"}


def _is_installed() -> bool:
    from importlib import metadata

    with contextlib.suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("tokenring"))
    return False


def _metadata(work: Path) -> Path:
    """A folder with what an installation would tell of the product, where it runs without one."""
    folder = work / "site"
    info = folder / "tokenring-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: tokenring\nVersion: 0\n")
    platform = "[sglang.srt.platforms]\ntokenring_cpu = app.engine.sglang.platform:activate\n"
    (info / "entry_points.txt").write_text(platform)
    return folder


def adopt_orphans() -> None:
    """Have the kernel make this process the parent of what its children leave behind (Linux)."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)


def end_all(but: set[psutil.Process]) -> None:
    """Kill this process's descendants but those, frozen ones too, and wait until they are gone."""
    left = [child for child in psutil.Process().children(recursive=True) if child not in but]
    for child in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.kill()
    psutil.wait_procs(left, KILL_WAIT_S)


def _status(record: StageRecord, ended: bool, returncode: int) -> Status:  # noqa: FBT001  # private
    if not ended:
        return "timed out"
    if returncode:
        record.error = record.error or f"its process ended with status {returncode}"
        return "failed"
    return "missed" if any(finding.verdict == "missed" for finding in record.findings) else "passed"


def _last_line(error: str) -> str:
    return f": {error.strip().splitlines()[-1][:300]}" if error else ""
