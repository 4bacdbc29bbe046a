"""What a process finds on PATH before it imports SGLang."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from app.engine.sglang import platform

SCRIPT = """
import subprocess
from app.engine.sglang.platform import prepare_process
prepare_process()
print(subprocess.run(["sh", "-c", "command -v python"], capture_output=True, text=True).stdout)
"""


def test_children_find_the_programs_of_the_environment_first() -> None:
    """A server that was started by its path compiles with the ninja of its own environment."""
    environ = {name: value for name, value in os.environ.items() if name != "PATH"} | {
        "PATH": "/usr/bin:/bin"
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == str(Path(sys.executable).parent / "python")


def found(own: Path, **environ: str) -> dict[str, str]:
    """The variables after the search, begun with these."""
    variables = {"PATH": "/usr/bin", **environ}
    platform.find_compilers(own, variables)
    return variables


def test_the_interpreters_folder_is_on_path_once(tmp_path: Path) -> None:
    """It goes first; a second search changes nothing."""
    once = found(tmp_path)
    assert once["PATH"] == f"{tmp_path}:/usr/bin"
    assert found(tmp_path, PATH=once["PATH"])["PATH"] == once["PATH"]


@pytest.mark.parametrize("named", ["CUDA_HOME", "CUDA_PATH", "nvcc on PATH", ""])
def test_the_pinned_compiler_is_the_last_choice(
    named: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CUDA_HOME is set only where the machine names no toolkit of its own."""
    (tmp_path / "cuda").mkdir()
    own = tmp_path / "bin"
    own.mkdir()
    monkeypatch.setattr(platform, "USUAL_NVCC", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: "/opt/nvcc" if named == "nvcc on PATH" else None)
    environ = found(own, **({named: "/opt/cuda"} if named.startswith("CUDA") else {}))
    assert environ.get("CUDA_HOME") == {"": str(tmp_path / "cuda"), "CUDA_HOME": "/opt/cuda"}.get(named)


def test_without_a_pinned_compiler_nothing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU machine gets no CUDA_HOME."""
    monkeypatch.setattr(platform, "USUAL_NVCC", tmp_path / "none")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert "CUDA_HOME" not in found(tmp_path / "bin")
