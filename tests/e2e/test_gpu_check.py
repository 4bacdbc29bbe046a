"""`scripts/gpu_check --dry-run` as a whole, without a GPU."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def check(*options):
    """The command with this interpreter, as on a node without .venv."""
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [ROOT / "scripts/gpu_check", *options]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=580, check=False)


@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_a_dry_run_goes_through_the_stages_and_writes_the_page(tmp_path):
    """Real SGLang reports itself and answers chats of each kind; speeds are of the scripted engine."""
    stages = ["machine", "start", "contract", "load", "bench"]
    ended = check("--dry-run", "--out", tmp_path, "--stages", ",".join(stages))
    state = json.loads((tmp_path / "state.json").read_text())
    assert {name: record["status"] for name, record in state["stages"].items()} == dict.fromkeys(
        stages, "passed"
    ), ended.stdout[-3000:]
    assert ended.returncode == 0
    found = {finding["label"]: finding for finding in state["stages"]["start"]["findings"]}
    assert found["attention backend"]["value"] == "torch_native"
    assert found["its text is the replay's"]["verdict"] == "met"
    assert state["stages"]["load"]["tables"]["Rising load"][1][1] == "1"
    page = (tmp_path / "report.md").read_text()
    assert all(f"## {stage}\n" in page for stage in stages)
    assert page.rstrip() in ended.stdout


def test_without_a_gpu_only_a_dry_run_begins(tmp_path):
    """It says so before anything is started or written."""
    ended = check("--out", tmp_path / "out")
    assert ended.returncode == 2
    assert "--dry-run" in ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_stage_that_is_not_there_is_named(tmp_path):
    """The command line lists those that are."""
    ended = check("--dry-run", "--out", tmp_path / "out", "--stages", "machine,speed")
    assert ended.returncode == 2
    assert "speed: must be one of machine, paths, start" in ended.stderr
