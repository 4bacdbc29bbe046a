"""Each fault of a machine is named, with what to do."""

from __future__ import annotations

import resource
import shutil
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from app.doctor import machine
from app.doctor.subject import GIB


def test_a_machine_without_a_gpu_has_no_gpu_faults(fake: Any) -> None:
    """What only a GPU needs is not applicable on a CPU."""
    checks = (machine.gpu, machine.driver, machine.compilers, machine.caches)
    assert {check(fake.subject).status for check in checks} == {"not_applicable"}


def test_healthy_gpus(fake: Any, installed: Callable[..., None]) -> None:
    """GPUs are counted and named; those that CUDA_VISIBLE_DEVICES hides are not."""
    installed(torch="2.13.0")
    fake.gpus(8)
    assert machine.gpu(fake.subject) == ("ok", "8 x NVIDIA H200, 140 GiB", "")
    fake.environ["CUDA_VISIBLE_DEVICES"] = "2,3"
    assert [gpu.number for gpu in fake.subject.gpus.seen] == [2, 3]
    fake.environ["CUDA_VISIBLE_DEVICES"] = "GPU-5c3a"
    assert len(fake.subject.gpus.seen) == 1


@pytest.mark.parametrize(
    ("script", "found", "advice"),
    [
        ("exec /usr/bin/tail -f /dev/null", "does not answer within", "Xid"),
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", "mismatch", "Xid"),
    ],
    ids=["hangs", "fails"],
)
def test_a_broken_driver(fake: Any, impatient: None, script: str, found: str, advice: str) -> None:
    """An nvidia-smi that hangs or fails is a failure of the GPU, within the time of a command."""
    fake.program("nvidia-smi", script)
    finding = machine.gpu(fake.subject)
    assert (finding.status, found in finding.detail, advice in finding.advice) == ("failure", True, True)


def test_a_gpu_that_the_container_was_not_given(fake: Any, installed: Callable[..., None]) -> None:
    """A card on the PCI bus without nvidia-smi is a failure for a CUDA build, and nothing for a CPU build."""
    fake.file("sys/bus/pci/devices/0000:01:00.0/vendor", "0x10de\n")
    fake.file("sys/bus/pci/devices/0000:01:00.0/class", "0x030200\n")
    installed(torch="2.13.0+cpu")
    assert machine.gpu(fake.subject).status == "not_applicable"
    installed(torch="2.13.0")
    finding = machine.gpu(fake.subject)
    assert (finding.status, "--gpus all" in finding.advice) == ("failure", True)


def test_torch_for_the_cpu_beside_a_gpu(fake: Any, installed: Callable[..., None]) -> None:
    """A CPU build of torch cannot use the GPUs that are there."""
    fake.gpus(1)
    installed(torch="2.13.0+cpu")
    finding = machine.gpu(fake.subject)
    assert (finding.status, "scripts/setup --profile gpu" in finding.advice) == ("failure", True)


def test_memory_that_another_program_has(fake: Any, installed: Callable[..., None]) -> None:
    """GPU memory in use before the start is a warning with the GPU's number."""
    installed(torch="2.13.0")
    fake.gpus(1, used_mib=70_000)
    finding = machine.gpu(fake.subject)
    assert (finding.status, "GPU 0 68 GiB" in finding.detail) == ("warning", True)


@pytest.mark.parametrize(
    ("version", "compat", "status"),
    [("580.82.07", False, "ok"), ("535.183.01", False, "failure"), ("535.183.01", True, "warning")],
)
def test_the_driver_s_version(fake: Any, version: str, compat: bool, status: str) -> None:
    """A driver older than CUDA 13 needs CUDA's compatibility libraries."""
    fake.gpus(1, driver=version)
    if compat:
        (fake.root / "usr/local/cuda/compat").mkdir(parents=True)
    finding = machine.driver(fake.subject)
    assert (finding.status, "580" in finding.advice) == (status, status != "ok")


@pytest.mark.parametrize(
    ("tp", "free_bytes", "status"),
    [(8, 64 * 1024**2, "failure"), (1, 64 * 1024**2, "warning"), (8, 16 * GIB, "ok")],
)
def test_a_tiny_shared_memory(
    fake: Any, monkeypatch: pytest.MonkeyPatch, tp: int, free_bytes: int, status: str
) -> None:
    """Docker's 64 MiB of /dev/shm fail a model on several GPUs, and are a warning on one."""
    fake.gpus(8)
    fake.settings["tp"] = tp
    usage = SimpleNamespace(total=free_bytes, free=free_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    finding = machine.shared_memory(fake.subject)
    assert (finding.status, "--ipc host" in finding.advice) == (status, status != "ok")


def test_no_shared_memory_at_all(fake: Any) -> None:
    """A missing /dev/shm is a failure."""
    assert machine.shared_memory(fake.subject).status == "failure"


@pytest.mark.parametrize(
    ("files", "locked", "status", "advice"),
    [
        (256, resource.RLIM_INFINITY, "failure", "ulimit -n"),
        (4096, resource.RLIM_INFINITY, "warning", "ulimit -n"),
        (65_536, 65_536, "warning", "memlock"),
        (65_536, resource.RLIM_INFINITY, "ok", ""),
    ],
)
def test_low_limits(
    fake: Any, monkeypatch: pytest.MonkeyPatch, files: int, locked: int, status: str, advice: str
) -> None:
    """Few open files and little locked memory are named, each with the flag that raises it."""
    fake.gpus(1)
    hard = {resource.RLIMIT_NOFILE: files, resource.RLIMIT_MEMLOCK: locked}
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (hard[kind], hard[kind]))
    finding = machine.limits(fake.subject)
    assert (finding.status, advice in finding.advice) == (status, True)


@pytest.mark.parametrize("missing", ["nvcc", "ninja", "c++"])
def test_a_missing_compiler(fake: Any, missing: str) -> None:
    """SGLang compiles kernels at run time: each of the three programs is missed by name."""
    fake.gpus(1)
    for program in {"nvcc", "ninja", "c++"} - {missing}:
        fake.program(program)
    finding = machine.compilers(fake.subject)
    assert (finding.status, finding.detail) == ("failure", f"not found: {missing}")
    fake.program(missing)
    assert machine.compilers(fake.subject).status == "ok"


def test_nvcc_is_looked_for_where_sglang_looks(fake: Any) -> None:
    """CUDA_HOME goes before PATH, and /usr/local/cuda is the last place."""
    fake.gpus(1)
    fake.program("ninja")
    fake.program("c++")
    fake.file("usr/local/cuda/bin/nvcc")
    assert machine.compilers(fake.subject).status == "ok"
    fake.environ["CUDA_HOME"] = str(fake.root / "empty")
    assert machine.compilers(fake.subject).detail == "not found: nvcc"


def test_caches_that_cannot_be_written(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache in a folder of somebody else is a failure that names the variable."""
    fake.gpus(1)
    theirs = fake.file("theirs/file").parent
    fake.environ["SGLANG_CACHE_DIR"] = str(theirs / "jit")
    # Root may write everywhere, so the system's answer is given here.
    monkeypatch.setattr("app.doctor.machine.os.access", lambda path, _: path != theirs)
    finding = machine.caches(fake.subject)
    assert (finding.status, f"SGLANG_CACHE_DIR ({theirs}/jit)" in finding.detail) == ("failure", True)
    assert "HF_HOME" not in finding.detail


@pytest.mark.parametrize(("kind", "status"), [("overlay", "warning"), ("ext4", "ok")])
def test_caches_that_end_with_the_container(
    fake: Any, monkeypatch: pytest.MonkeyPatch, kind: str, status: str
) -> None:
    """Compiled kernels in a container's own layer are compiled again by the next one."""
    fake.gpus(1)
    mount = SimpleNamespace(mountpoint=str(fake.root), fstype=kind)
    monkeypatch.setattr("app.doctor.subject.psutil.disk_partitions", lambda **_: [mount])
    finding = machine.caches(fake.subject)
    assert (finding.status, "SGLANG_CACHE_DIR" in finding.detail) == (status, True)
