"""Checks of the machine: GPUs and their driver, memory, limits, compilers, caches."""

from __future__ import annotations

import os
import resource
import shutil
from pathlib import Path

from app.doctor.subject import (
    GIB,
    Finding,
    Subject,
    failure,
    file_system,
    nearest,
    not_applicable,
    ok,
    torch_is_for_cpu,
    warning,
)

MIN_DRIVER = 580
"""The first driver for CUDA 13, for which the pinned torch and FlashInfer are built."""
MIN_SHM_BYTES = GIB
"""Docker's default is 64 MiB, and NCCL takes up to 33 MiB for each pair of GPUs without peer access."""
MIN_FILES = 1024
NVIDIA = "0x10de"
LOST = frozenset({"overlay", "aufs", "tmpfs", "ramfs"})
"""File systems that end with the container or the boot."""
NO_GPU = "no NVIDIA GPU: the engine runs on the CPU"


def gpu(subject: Subject) -> Finding:
    """The GPUs that the server would see."""
    gpus = subject.gpus
    if gpus.trouble:
        return failure(
            gpus.trouble,
            "look for `Xid` in dmesg and restart the driver or the machine; if nvidia-smi is only slow, set"
            " persistence mode: nvidia-smi -pm 1",
        )
    if not gpus.seen:
        if not _has_nvidia_device(subject.root) or torch_is_for_cpu():
            return not_applicable(NO_GPU)
        return failure(
            "an NVIDIA GPU is in this machine, and this process sees none",
            "install the NVIDIA driver; in a container, install the NVIDIA Container Toolkit and pass"
            " --gpus all; look at CUDA_VISIBLE_DEVICES",
        )
    names = sorted({f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB" for gpu in gpus.seen})
    detail = f"{len(gpus.seen)} x {' / '.join(names)}"
    if torch_is_for_cpu():
        return failure(f"{detail}, and torch is built for the CPU", "run scripts/setup --profile gpu")
    used = [f"GPU {gpu.number} {gpu.used_bytes / GIB:.0f} GiB" for gpu in gpus.seen if gpu.used_bytes > GIB]
    if used:
        return warning(
            f"{detail}; in use already: {', '.join(used)}",
            "unless that is this server itself, end the program that nvidia-smi lists",
        )
    return ok(detail)


def driver(subject: Subject) -> Finding:
    """The version of the NVIDIA driver."""
    gpus = subject.gpus.seen
    if not gpus:
        return not_applicable(NO_GPU)
    version = gpus[0].driver
    if int(version.split(".")[0]) >= MIN_DRIVER:
        return ok(version)
    advice = f"install driver {MIN_DRIVER} or newer: the engine is built for CUDA 13"
    if (subject.root / "usr/local/cuda/compat").is_dir():
        return warning(f"{version}, with CUDA's compatibility libraries", f"{advice}, if it does not start")
    return failure(version, advice)


def shared_memory(subject: Subject) -> Finding:
    """The size of /dev/shm, through which the processes of one model speak."""
    folder = subject.root / "dev/shm"
    try:
        usage = shutil.disk_usage(folder)
    except OSError as exc:
        return failure(f"{folder}: {exc.strerror}", "mount a tmpfs there; in a container, pass --ipc host")
    detail = f"{usage.total / GIB:.2f} GiB, {usage.free / GIB:.2f} GiB free"
    if usage.free >= MIN_SHM_BYTES:
        return ok(detail)
    many = len(subject.gpus.seen) > 1 and subject.settings.tp != 1
    advice = "in a container, pass --ipc host or --shm-size 16g; else make room in /dev/shm"
    return failure(detail, advice) if many else warning(detail, advice)


def limits(subject: Subject) -> Finding:
    """The limits of open files and of locked memory."""
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    _, locked = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = resource.RLIM_INFINITY
    detail = ", ".join(
        f"{name} {'unlimited' if value == unlimited else value}"
        for name, value in (("open files", files), ("locked memory in bytes", locked))
    )
    wanted = subject.settings.max_live_streams
    if files != unlimited and files < MIN_FILES:
        return failure(detail, "raise it: ulimit -n 65536, --ulimit nofile=65536, or LimitNOFILE=65536")
    if files != unlimited and files < wanted:
        return warning(
            f"{detail}; max_live_streams is {wanted}",
            "each stream is a file: ulimit -n 65536, --ulimit nofile=65536, or LimitNOFILE=65536",
        )
    if subject.gpus.seen and locked != unlimited:
        return warning(detail, "--ulimit memlock=-1, or LimitMEMLOCK=infinity: pinned memory counts")
    return ok(detail)


def compilers(subject: Subject) -> Finding:
    """The programs with which SGLang compiles kernels while it runs."""
    if not subject.gpus.seen:
        return not_applicable(f"{NO_GPU}, for which nothing is compiled")
    home = subject.environ.get("CUDA_HOME") or subject.environ.get("CUDA_PATH")
    nvcc = Path(home) / "bin/nvcc" if home else subject.which("nvcc")
    nvcc = nvcc or subject.root / "usr/local/cuda/bin/nvcc"
    compiler = subject.which("c++") or subject.which("g++")
    programs = {
        "nvcc": (Path(nvcc).is_file(), "install the CUDA 13 toolkit, or set CUDA_HOME to it"),
        "ninja": (subject.which("ninja"), "put .venv/bin on PATH, or install ninja-build"),
        "c++": (compiler, "install g++"),
    }
    missing = {name: advice for name, (there, advice) in programs.items() if not there}
    if missing:
        return failure(f"not found: {', '.join(missing)}", "; ".join(missing.values()))
    return ok(f"{nvcc}, {subject.which('ninja')}, {compiler}")


def caches(subject: Subject) -> Finding:
    """The folders that keep compiled kernels and downloaded models."""
    folders = {"HF_HOME": subject.folder("HF_HOME", ".cache/huggingface")}
    if subject.gpus.seen:
        folders["SGLANG_CACHE_DIR"] = subject.folder("SGLANG_CACHE_DIR", ".cache/sglang")
    elif not subject.settings.model or Path(subject.settings.model).exists():
        return not_applicable("nothing is compiled for a CPU, and the model is a folder")
    locked = [f"{name} ({folder})" for name, folder in folders.items() if not _writable(folder)]
    if locked:
        return failure(
            f"this user cannot write: {', '.join(locked)}", "set the variable to a folder that it can write"
        )
    lost = [f"{name} ({folder})" for name, folder in folders.items() if file_system(folder) in LOST]
    if lost:
        return warning(
            f"ends with the container or the boot: {', '.join(lost)}",
            "set the variable to a folder on a disk (in the image: below /data), or each start compiles and"
            " downloads again",
        )
    return ok(", ".join(f"{name} {folder}" for name, folder in folders.items()))


def _has_nvidia_device(root: Path) -> bool:
    """True if a display or 3D controller of NVIDIA is on the PCI bus, driver or not."""
    for device in (root / "sys/bus/pci/devices").glob("*"):
        vendor, kind = device / "vendor", device / "class"
        if vendor.is_file() and vendor.read_text().strip() == NVIDIA and kind.read_text()[:4] == "0x03":
            return True
    return False


def _writable(folder: Path) -> bool:
    return os.access(nearest(folder), os.W_OK)
