"""The result of a check, and what checks look at."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

import psutil

from app.settings import Settings

Status = Literal["ok", "warning", "failure", "not_applicable"]
COMMAND_S = 4.0
"""Seconds for a command: nvidia-smi takes some without persistence mode, and hangs with a broken GPU."""
KILL_S = 0.2
"""Seconds to wait for a process that was killed: one that waits for a device cannot be."""
GIB = 1024**3
GPU_FIELDS = "index,name,driver_version,memory.total,memory.used"

T = TypeVar("T")


class Finding(NamedTuple):
    """The result of one check: its status, its facts, and, unless it is ok, what to do."""

    status: Status
    detail: str
    advice: str = ""


ok = partial(Finding, "ok")
warning = partial(Finding, "warning")
failure = partial(Finding, "failure")
not_applicable = partial(Finding, "not_applicable")


class Gpu(NamedTuple):
    """An NVIDIA GPU as nvidia-smi shows it."""

    number: int
    name: str
    driver: str
    memory_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Gpus:
    """The GPUs that a server would see, or `trouble`: why nvidia-smi does not show them."""

    seen: tuple[Gpu, ...] = ()
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Subject:
    """The subject of the checks: settings, environment and machine, whose `/` is `root`."""

    settings: Settings
    environ: Mapping[str, str]
    listing: Future[Gpus]
    starting: bool = False
    """A server is about to start: a port or store that another one has is then a failure."""
    root: Path = Path("/")

    @property
    def gpus(self) -> Gpus:
        """The GPUs; waits for nvidia-smi, `COMMAND_S` at most."""
        return self.listing.result()

    def which(self, program: str) -> str | None:
        """The path of a program that the server would find."""
        return shutil.which(program, path=self.environ.get("PATH"))

    def folder(self, variable: str, default: str) -> Path:
        """The folder that a variable names; `default` is below the user's home."""
        home = Path(self.environ.get("HOME", "/"))
        return Path(self.environ.get(variable) or home / default)


def later(work: Callable[[], T]) -> Future[T]:
    """The result of `work`, done in a daemon thread."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except Exception as exc:  # noqa: BLE001  # raised again by `result()`
            future.set_exception(exc)

    threading.Thread(target=run, name="doctor", daemon=True).start()
    return future


def output_of(command: list[str], environ: Mapping[str, str]) -> tuple[int | None, str]:
    """The exit status of a command, None where it did not end in time, and what it printed."""
    process = subprocess.Popen(  # noqa: S603  # fixed commands
        command,
        env=dict(environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )
    try:
        printed, _ = process.communicate(timeout=COMMAND_S)
    except subprocess.TimeoutExpired:
        process.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(KILL_S)
        assert process.stdout is not None
        process.stdout.close()
        return None, ""
    return process.returncode, printed.rstrip()


def gpus_of(environ: Mapping[str, str]) -> Gpus:
    """The GPUs by nvidia-smi, a program and not its library: a process can be left behind when it hangs."""
    program = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if program is None:
        return Gpus()
    command = [program, f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader,nounits"]
    status, printed = output_of(command, environ)
    if status is None:
        return Gpus(trouble=f"nvidia-smi does not answer within {COMMAND_S:g} s")
    rows = [line.split(", ") for line in printed.splitlines()]
    if status or not all(len(row) == len(GPU_FIELDS.split(",")) for row in rows):
        return Gpus(trouble=f"nvidia-smi fails: {printed.splitlines()[0] if printed else f'status {status}'}")
    gpus = tuple(
        Gpu(int(index), name, driver, _mib(total), _mib(used)) for index, name, driver, total, used in rows
    )
    return Gpus(_visible(gpus, environ.get("CUDA_VISIBLE_DEVICES")))


def _mib(number: str) -> int:
    """MiB in bytes; 0 for `[N/A]`, as a GPU that shares the machine's memory has it."""
    return int(number) * 1024**2 if number.isdigit() else 0


def _visible(gpus: tuple[Gpu, ...], chosen: str | None) -> tuple[Gpu, ...]:
    """The GPUs of `CUDA_VISIBLE_DEVICES`; where that names them by UUID, as many of them."""
    if chosen is None:
        return gpus
    names = [name.strip() for name in chosen.split(",") if name.strip()]
    if all(name.isdigit() for name in names):
        return tuple(gpu for gpu in gpus if str(gpu.number) in names)
    return gpus[: len(names)]


def torch_is_for_cpu() -> bool:
    """True if the installed torch is a CPU build; not imported, as that takes seconds."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return "+cpu" in metadata.version("torch")
    return False


def file_system(path: Path) -> str:
    """The type of the file system that a path is, or would be, on; empty where unknown."""
    path = path.absolute()
    mounts = {Path(disk.mountpoint): disk.fstype for disk in psutil.disk_partitions(all=True)}
    return next((mounts[folder] for folder in (path, *path.parents) if folder in mounts), "")


def nearest(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if os.path.lexists(folder))
