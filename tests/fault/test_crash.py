"""The server killed by SIGKILL under load, and started on the same data; docs/inside/crash-safety.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def crash(tmp_path, *options):
    """`scripts/crashtest` with these options: its result. It fails where anything did not hold."""
    written = tmp_path / "result.json"
    command = [sys.executable, "-m", "scripts.crash", *options, "--json", str(written)]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-8000:]
    return json.loads(written.read_text())


@pytest.mark.timeout(300)
def test_eight_kills_leave_true_streams_and_balanced_books(tmp_path):
    """8 kills under 20 streams: nothing left open, nothing billed twice, every client told the truth.

    `scripts/crashtest` has 300.
    """
    result = crash(tmp_path, "--kills", "8", "--longest-s", "2")
    assert result["violations"] == []
    assert result["ends"]["interrupted"] > 40
    assert result["ends"]["length"] > 20
    assert 0 < result["worst_shortfall_s"] < 1.5
    assert result["most_billed_beyond_received_tokens"] == 0


@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_a_kill_of_real_sglang(tmp_path):
    """The same with the real engine, whose processes go with the server; killed after 4 s of traffic."""
    result = crash(tmp_path, "--kills", "1", "--seed", "14", "--engine", "sglang")
    assert result["violations"] == []
    assert result["ends"]["interrupted"] > 0
