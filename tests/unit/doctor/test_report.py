"""All checks end within seconds, and the command says whether one found a failure."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from app.cli.main import main
from app.doctor import report
from app.doctor.subject import failure, ok
from app.engine.sglang import platform
from app.settings import Settings


def test_a_check_that_hangs_or_breaks_is_said(fake: Any) -> None:
    """The others have their findings all the same."""
    never = threading.Event()
    checks = {
        "hangs": lambda _: ok(str(never.wait())),
        "breaks": lambda _: ok(str(1 // 0)),
        "works": lambda _: ok("well"),
    }
    found = report.examined(fake.subject, checks, longest_s=0.2)
    never.set()
    assert [f.status for f in found.values()] == ["warning", "warning", "ok"]
    assert "ZeroDivisionError" in found["breaks"].detail


def test_every_failure_and_warning_says_what_to_do(fake: Any) -> None:
    """No finding that is not well leaves its reader alone."""
    fake.program("nvidia-smi", "exit 1")
    fake.settings |= {"model": "/nowhere", "safety_policy": "/nowhere.toml", "tp": 3}
    found = report.examined(fake.subject)
    assert {"gpu", "shared_memory", "model", "policy"} <= {
        n for n, f in found.items() if f.status == "failure"
    }
    assert [n for n, f in found.items() if f.status in {"failure", "warning"} and not f.advice] == []
    assert set(found) == set(report.CHECKS)


def test_the_compilers_are_those_that_the_server_will_find(
    fake: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pinned CUDA compiler and the ninja beside the interpreter count, as the server uses both."""
    nvcc, ninja = fake.file("venv/cuda/bin/nvcc"), fake.file("venv/bin/ninja")
    ninja.chmod(0o755)
    fake.gpus(1)
    fake.program("c++")
    monkeypatch.setattr(sys, "executable", str(tmp_path / "venv/bin/python"))
    monkeypatch.setattr(platform, "USUAL_NVCC", tmp_path / "none")
    monkeypatch.setattr(report, "CHECKS", {"compilers": report.CHECKS["compilers"]})
    monkeypatch.setattr(report.examined, "__defaults__", (report.CHECKS, report.MAX_CHECKS_S))
    monkeypatch.setenv("PATH", str(fake.bin))
    monkeypatch.delenv("CUDA_HOME", raising=False)
    monkeypatch.delenv("CUDA_PATH", raising=False)
    [found] = report.examine(Settings()).values()
    assert found == ok(f"{nvcc}, {ninja}, {fake.bin / 'c++'}")


def test_a_failure_is_a_line() -> None:
    """What `serve` prints: the check, what was found, what to do."""
    found = {"disk": ok("64 GiB"), "port": failure("taken", "choose another --port")}
    assert report.failures(found) == ["port: taken. To do: choose another --port"]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without settings, and the one check that a test decides."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(report, "CHECKS", {"policy": report.CHECKS["policy"]})
    monkeypatch.setattr(report.examined, "__defaults__", (report.CHECKS, report.MAX_CHECKS_S))
    return tmp_path


def test_the_command_ends_with_1_where_a_check_fails(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And with 0 where none does; `--json` prints one object with the same findings."""
    assert main(["doctor"]) == 0
    assert "the built-in policy" in capsys.readouterr().out
    assert main(["doctor", "--json", "--safety-policy", "nowhere.toml"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert (printed["object"], printed["ok"]) == ("doctor", False)
    [row] = printed["findings"]
    assert set(row) == {"check", "status", "detail", "advice"}
    assert (row["check"], row["status"], row["advice"]) == ("policy", "failure", "correct the policy file")


def test_settings_that_cannot_be_read_are_a_finding(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The machine is checked all the same."""
    (here / "tokenring.toml").write_text("prot = 8000\n")
    assert main(["doctor", "--json"]) == 1
    settings, policy = json.loads(capsys.readouterr().out)["findings"]
    assert (settings["check"], "did you mean 'port'" in settings["detail"]) == ("settings", True)
    assert policy["status"] == "ok"
