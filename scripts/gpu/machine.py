"""Stage `machine`: the GPU, the driver, CUDA and the versions of what computes; what is missing is named."""

from __future__ import annotations

import shutil
import tomllib
from importlib import metadata
from typing import Any

from scripts.benchmarks.findings import unjudged
from scripts.benchmarks.machine import ROOT, describe_machine
from scripts.gpu.state import Checkup

KERNELS = (
    "sglang-kernel",
    "sgl-kernel",
    "flashinfer-python",
    "flashinfer-cubin",
    "flashinfer-jit-cache",
    "triton",
    "xgrammar",
    "nvidia-nccl-cu13",
)
COMPILERS = ("ninja", "nvcc")


def run(check: Checkup) -> None:
    """See the module."""
    machine = describe_machine()
    check.keep("machine", machine)
    for name in ("date_utc", "cpu", "cores", "memory_gib", "kernel", "python"):
        check.find(unjudged(name, machine[name]))
    versions = machine["versions"]
    assert isinstance(versions, dict)
    for name, version in {**versions, **{name: _version(name) for name in KERNELS}}.items():
        if version:
            check.find(unjudged(name, version))
    for tool in COMPILERS:
        check.find(unjudged(tool, shutil.which(tool) or "not on PATH"))
    missing = [name for name in _dependencies() if _version(name) is None]
    check.holds("packages of the product that are missing", ", ".join(missing) or "none", "none", not missing)
    if not check.options.dry_run:
        _gpu(check, machine)


def _gpu(check: Checkup, machine: dict[str, Any]) -> None:
    import torch

    gpus = machine["gpus"] or [torch.cuda.get_device_name(0)]
    check.find(unjudged("GPUs, memory, driver", "; ".join(gpus)))
    check.find(unjudged("CUDA of torch", torch.version.cuda or torch.version.hip))
    major, minor = torch.cuda.get_device_capability(0)
    check.find(unjudged("compute capability", f"{major}.{minor}"))
    product = (torch.ones(256, 256, device="cuda") @ torch.ones(256, 256, device="cuda")).sum().item()
    check.holds("sum of a matrix product on the GPU", f"{product:.0f}", f"{256**3}", product == 256**3)


def _dependencies() -> list[str]:
    """The packages that pyproject.toml depends on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return [requirement.partition("=")[0] for requirement in project["dependencies"]]


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
