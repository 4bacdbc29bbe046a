"""What a process is told, and finds on PATH, before it imports SGLang."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from app.engine.sglang import platform

PREPARED = """
import json, multiprocessing, multiprocessing.resource_tracker as tracker, subprocess
from app.engine.sglang.platform import prepare_process
multiprocessing.set_start_method("spawn")  # as SGLang's import does
registered = []
tracker.register = lambda name, kind: registered.append(kind)
prepare_process()
from tqdm.auto import tqdm
list(tqdm(range(3)))
found = subprocess.run(["sh", "-c", "command -v python"], capture_output=True, text=True).stdout.strip()
print(json.dumps({"python": found, "registered": registered}))
"""


@pytest.fixture(scope="module")
def prepared() -> dict[str, Any]:
    """A process that was started by its path: the `python` that its children find, and its semaphores."""
    environ = os.environ | {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        [sys.executable, "-c", PREPARED], env=environ, capture_output=True, text=True, check=True
    )
    seen: dict[str, Any] = json.loads(done.stdout)
    return seen


def test_children_find_the_programs_of_the_environment_first(prepared: dict[str, Any]) -> None:
    """A server that was started by its path compiles with the ninja of its own environment."""
    assert prepared["python"] == str(Path(sys.executable).parent / "python")


def test_a_progress_bar_makes_no_semaphore(prepared: dict[str, Any]) -> None:
    """A process that ends without clean-up has none that multiprocessing would report as leaked."""
    assert prepared["registered"] == []


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


TARGET = """
import pickle, signal
from app.engine.sglang.platform import ChildEntry
pickle.loads(pickle.dumps(ChildEntry("m:f", {})))
print([signal.getsignal(s) is signal.SIG_IGN for s in (signal.SIGINT, signal.SIGTERM)])
"""


def test_children_leave_stopping_to_the_server() -> None:
    """Ctrl-C and SIGTERM to the process group do not reach SGLang's processes."""
    environ = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}  # so that nothing else is to be prepared
    done = subprocess.run(
        [sys.executable, "-c", TARGET], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[True, True]"


ORPHAN = """
import multiprocessing, os, signal
from app.engine.sglang.platform import ChildEntry
if __name__ == "__main__":
    child = multiprocessing.get_context("spawn").Process(target=ChildEntry("time:sleep", {}), args=(90,))
    child.start()
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_child_whose_parent_is_killed_while_it_begins_ends_with_it(tmp_path: Path) -> None:
    """Before its imports are done; it holds the output open that is read here to its end."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    environ = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "PYTHONPATH": str(Path.cwd())}
    done = subprocess.run([sys.executable, script], env=environ, capture_output=True, timeout=40, check=False)
    assert done.returncode == -signal.SIGKILL


COLLECTING = """
import gc, pickle
from app.engine.sglang.platform import ChildEntry, without_collections
seen = []
for _ in range(2):
    with without_collections():
        seen.append(gc.isenabled())
    seen.append(gc.isenabled())
    gc.disable()
gc.enable()
entry = pickle.loads(pickle.dumps(ChildEntry("gc:isenabled", {})))
print(seen, [gc.isenabled(), entry()])
"""


def test_garbage_is_collected_again_once_sglang_is_imported() -> None:
    """In the server and its children; a process that collects none stays so."""
    environ = os.environ | {"SGLANG_USE_CPU_ENGINE": "1"}
    done = subprocess.run(
        [sys.executable, "-c", COLLECTING], env=environ, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[False, True, False, False] [False, True]"
