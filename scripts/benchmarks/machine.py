"""What a result was measured on: hardware, versions, commit, time. Names no host."""

from __future__ import annotations

import datetime as dt
import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[2]
VERSIONED = ("sglang", "torch", "transformers", "uvicorn", "uvloop", "httptools", "starlette", "orjson")


def describe_machine() -> dict[str, object]:
    """The machine, versions and commit, as they go into a result file."""
    return {
        "date_utc": dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": commit(),
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30),
        "gpus": _gpus(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in VERSIONED},
        "load_average_1_min": os.getloadavg()[0],
    }


def commit() -> str:
    """The checked-out commit, with `+changes` where tracked files of the product differ from it."""
    head = _output(["git", "-C", str(ROOT), "rev-parse", "--short=10", "HEAD"])
    changed = _output(
        [
            "git",
            "-C",
            str(ROOT),
            "status",
            "--porcelain",
            "--",
            "app",
            "scripts",
            "pyproject.toml",
            "requirements",
        ]
    )
    return (head or "unknown") + ("+changes" if changed else "")


def cpu_model() -> str:
    """The processor's name as the kernel states it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _gpus() -> list[str]:
    return _output(
        ["nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    ).splitlines()


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""
