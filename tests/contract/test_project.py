"""The pins agree with each other and with SGLang's own; the scripts can be run; the README's tree exists."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from scripts.support import set_up

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
COMMANDS = [*sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix)]

# In SGLang's list, but CUDA's: a CPU machine takes the version xgrammar asks for, or has none.
NOT_ON_CPU = {"apache-tvm-ffi"}


def pins(name: str) -> dict[str, Version]:
    """The versions a requirements file pins, by canonical name; anything but `name==version` fails."""
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    found: dict[str, Version] = {}
    for line in lines:
        if line and not line.startswith("#"):
            requirement = Requirement(line)
            assert re.fullmatch(r"==[^*,]+", str(requirement.specifier)), line
            canonical = canonicalize_name(requirement.name)
            assert canonical not in found, f"{canonical} twice in {name}"
            found[canonical] = Version(str(requirement.specifier)[2:])
    return found


@pytest.mark.parametrize("name", ["cpu.txt", "gpu.txt", "gpu-lock.txt", "dev.txt"])
def test_every_requirement_is_an_exact_pin(name: str) -> None:
    """Each line is `name==version`, no name twice."""
    assert pins(name)


@pytest.mark.parametrize("profile", ["cpu.txt", "gpu.txt"])
def test_what_the_package_depends_on_is_pinned(profile: str) -> None:
    """Every dependency of pyproject.toml is in the set, in a version that it allows."""
    pinned = pins(profile) | pins_of_torch()
    for text in PROJECT["dependencies"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


def pins_of_torch() -> dict[str, Version]:
    """The torch that scripts/setup installs before the rest."""
    requirement = Requirement(set_up.TORCH)
    return {requirement.name: Version(str(requirement.specifier)[2:])}


def test_cpu_and_gpu_run_the_same_versions_of_ours() -> None:
    """Where both sets pin a package, they pin the same version."""
    cpu, gpu = pins("cpu.txt") | pins_of_torch(), pins("gpu.txt")
    assert {name: version for name, version in gpu.items() if cpu.get(name, version) != version} == {}


def test_the_gpu_lock_is_complete() -> None:
    """Whatever SGLang and this package ask for on a GPU node has its version, one that both allow."""
    locked, chosen = pins("gpu-lock.txt"), pins("gpu.txt")
    assert {name: locked.get(name) for name in chosen} == chosen
    for text in [*(importlib.metadata.requires("sglang") or []), *PROJECT["dependencies"]]:
        requirement = Requirement(text)
        if not requirement.marker or requirement.marker.evaluate({"extra": ""}):
            version = locked[canonicalize_name(requirement.name)]
            assert requirement.specifier.contains(version, prereleases=True), text


def test_the_gpu_lock_has_one_compiler() -> None:
    """nvcc, its headers, its back ends and the runtime are of the CUDA that torch is built with."""
    locked = pins("gpu-lock.txt")
    cuda = locked["cuda-toolkit"].release[:2]
    compilers = ("nvcc", "crt", "nvrtc")
    versions = {locked[f"nvidia-cuda-{part}"] for part in compilers}
    versions |= {locked["nvidia-nvvm"], locked["nvidia-nvjitlink"]}
    assert len(versions) == 1
    [version] = versions
    for part in (version, locked["nvidia-cuda-runtime"], locked["nvidia-cuda-cccl"]):
        assert part.release[:2] == cuda


def test_the_gpu_extra_is_the_gpu_set() -> None:
    """pyproject.toml's gpu extra and requirements/gpu.txt name the same kernels."""
    pinned = pins("gpu.txt")
    for text in PROJECT["optional-dependencies"]["gpu"]:
        requirement = Requirement(text)
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), text


def test_no_pin_contradicts_sglang() -> None:
    """What SGLang requires and the CPU set has, it has in a version that SGLang allows."""
    pinned = pins("cpu.txt") | pins_of_torch()
    for text in importlib.metadata.requires("sglang") or []:
        requirement = Requirement(text)
        name = canonicalize_name(requirement.name)
        if (
            name in pinned
            and name not in NOT_ON_CPU
            and (not requirement.marker or requirement.marker.evaluate())
        ):
            assert requirement.specifier.contains(pinned[name]), text


def test_the_cpu_set_is_what_is_installed() -> None:
    """The tests run on the pinned versions."""
    for name, version in pins("cpu.txt").items():
        assert Version(importlib.metadata.version(name)) == version, name


@pytest.mark.parametrize("name", [*(f"scripts/{command}" for command in COMMANDS), ".ci/run"])
def test_commands_can_be_run(name: str) -> None:
    """Each command is executable and starts with an interpreter line; shell ones parse."""
    path = ROOT / name
    assert os.access(path, os.X_OK)
    first = path.read_text().splitlines()[0]
    assert first.startswith("#!/usr/bin/env ")
    if first.endswith("bash"):
        assert subprocess.run(["bash", "-n", path], check=False).returncode == 0


def test_the_fixed_commands_are_there() -> None:
    """The commands that the README promises exist."""
    assert {"serve", "test", "check", "bench", "setup"} <= set(COMMANDS)


def test_the_command_of_a_clone_prints_what_the_installed_one_does(tmp_path: Path) -> None:
    """scripts/tokenring passes its arguments on, and what the set-up says is not on standard output."""
    for name, script in {"scripts/setup": "echo set up", ".venv/bin/python": 'echo "$@"'}.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
    shutil.copy(ROOT / "scripts/tokenring", tmp_path / "scripts")
    command = [tmp_path / "scripts/tokenring", "keys", "create", "--name", "ann at work"]
    ended = subprocess.run(command, capture_output=True, check=True, text=True)
    assert (ended.stdout, ended.stderr) == ("-m app keys create --name ann at work\n", "set up\n")


UNIT_TESTS = [
    path.relative_to(ROOT / "tests/unit") for path in sorted((ROOT / "tests/unit").rglob("test_*.py"))
]


@pytest.mark.parametrize("path", [path for path in UNIT_TESTS if path.parts[0] != "scripts"], ids=str)
def test_a_unit_test_stands_where_its_module_stands(path: Path) -> None:
    """Its folder is that of its module, and its name begins with that of its module."""
    words = path.stem.removeprefix("test_").split("_")
    names = ["_".join(words[:length]) for length in range(1, len(words) + 1)]
    assert any((ROOT / "app" / path.parent / f"{name}.py").exists() for name in names)


def test_setup_and_the_package_take_the_same_pythons() -> None:
    """pyproject.toml, scripts/setup and set_up.py agree on which versions of Python work."""
    oldest, too_new = set_up.OLDEST_PYTHON, set_up.TOO_NEW_PYTHON
    assert PROJECT["requires-python"] == ">={}.{},<{}.{}".format(*oldest, *too_new)
    assert f"{oldest} <= sys.version_info < {too_new}" in (ROOT / "scripts" / "setup").read_text()


def test_the_quick_start_names_the_disk_that_setup_needs() -> None:
    """The gigabytes of docs/quick-start.md are those that scripts/setup asks for on one disk."""
    disk_gb = {kind: f"{set_up.VENV_GB[kind] + 2 * set_up.WHEELS_GB[kind]:.0f}" for kind in set_up.VENV_GB}
    text = " ".join((ROOT / "docs" / "quick-start.md").read_text("utf-8").split())
    assert f"without an index of CPU builds it is {disk_gb['cpu, torch with CUDA']} GB" in text
    assert f"{disk_gb['cpu']} GB of free disk ({disk_gb['gpu']} GB on a machine with an NVIDIA GPU)" in text


def other_pythons() -> list[str]:
    """The interpreters of this machine, besides this one, whose versions setup takes: by PATH and pyenv."""
    versions = [(3, minor) for minor in range(set_up.OLDEST_PYTHON[1], set_up.TOO_NEW_PYTHON[1])]
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    usable = []
    for major, minor in versions:
        name = f"python{major}.{minor}"
        candidates = [shutil.which(name), *sorted(pyenv.glob(f"versions/{major}.{minor}.*/bin/python"))]
        runs = [
            str(path)
            for path in candidates
            if path and not subprocess.run([path, "-c", ""], capture_output=True, check=False).returncode
        ]
        if (major, minor) != sys.version_info[:2]:
            usable += runs[:1]
    return usable


COMPILE = """
import sys
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        compile(file.read(), path, "exec")
"""


def test_the_sources_compile_under_the_other_pythons() -> None:
    """Each supported Python that this machine has reads every module without an error or a warning."""
    pythons = other_pythons()
    if not pythons:
        pytest.skip("this machine has no other Python that setup takes")
    sources = [str(path) for part in ("app", "scripts", "tests") for path in (ROOT / part).rglob("*.py")]
    for python in pythons:
        subprocess.run([python, "-I", "-W", "error", "-c", COMPILE, *sources], check=True)


def test_the_changelog_begins_with_what_is_not_released_and_has_this_version() -> None:
    """`[Unreleased]` comes first, then the version that pyproject.toml has."""
    versions = re.findall(r"^## \[(.+?)\]", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert versions[:2] == ["Unreleased", PROJECT["version"]]
