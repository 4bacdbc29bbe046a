"""LiteLLM's proxy as a server under test: its installation, its configuration, and what counts as its CPU."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.benchmarks import litellm
from scripts.benchmarks.processes import CpuUse, ServerProcess


def test_the_environment_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """With the pinned version; a second call finds it."""
    commands: list[list[str]] = []
    monkeypatch.setattr(subprocess, "run", lambda command, **_: commands.append(command))
    folder = tmp_path / "venv"
    folder.mkdir()
    litellm.install(folder)
    litellm.install(folder)
    assert len(commands) == 2
    assert commands[1][-1] == f"litellm[proxy]=={litellm.VERSION}"


def test_where_it_cannot_be_had_the_command_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Nothing half made stays behind, so that the next run tries again."""
    folder = tmp_path / "venv"

    def fail(command: list[str], **_: Any) -> None:
        folder.mkdir(exist_ok=True)
        if "pip" in command:
            raise subprocess.CalledProcessError(
                1, command, stderr="WARNING: x\nERROR: No matching distribution"
            )

    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(
        SystemExit, match=r"cannot be installed here: ERROR: No matching(.|\n)*--with-litellm"
    ):
        litellm.install(folder)
    assert not folder.exists()


def test_the_cpu_of_the_proxy_is_that_of_the_server_behind_it_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A token passes through both; the proxy asks for the model under its own name."""
    behind = ServerProcess("bare", ["true"], 4711, tmp_path / "log")
    monkeypatch.setattr(ServerProcess, "cpu", lambda self: CpuUse(1.0 if self is behind else 2.0, 4.0, 0.5))
    proxy = litellm.ProxiedServer("litellm", behind, 4712, tmp_path, "tokenring-builtin")
    assert proxy.cpu() == CpuUse(3.0, 8.0, 1.0)
    [model] = json.loads((tmp_path / "litellm.json").read_text())["model_list"]
    assert model["model_name"] == litellm.MODEL
    assert model["litellm_params"]["model"] == "openai/tokenring-builtin"
    assert model["litellm_params"]["api_base"] == "http://127.0.0.1:4711/v1"
