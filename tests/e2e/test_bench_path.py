"""`scripts/bench path` as a whole, on little."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.benchmarks import memory, path, screen_cpu

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(240)
def test_every_row_that_needs_no_engine_is_measured(tmp_path):
    """The path, both of its loads, against ready-made frames and itself without screens; and settlements."""
    result = tmp_path / "path.json"
    options = ["--rows", "path,settlements", "--streams", "2,256", "--pairs", "1"]
    options += ["--tokens", "4", "--rounds", "1", "--json", str(result)]
    command = [sys.executable, "-m", "scripts.benchmarks", "path", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr
    written = json.loads(result.read_text())
    assert [(run["streams"], run["server"]) for run in written["runs"]] == [
        (streams, server) for streams in (2, 256) for server in ("ours", "screens off", "ready-made")
    ]
    assert {run["frames_per_token"] for run in written["runs"]} == {1.0}
    assert [label for label, _ in written["rows"]] == [
        "events/s through the full path on one core, 2 streams, against ready-made",
        "CPU per token of the full path at saturation, us, 256 streams, against ready-made",
        "screens' share of the full path, 2 streams",
        "screens' share of the full path, 256 streams",
        "durable settlements per second, 64 at once, against one commit each",
    ]
    assert done.stdout.count("█") > 6


@pytest.mark.timeout(240)
def test_the_screens_by_themselves_and_memory_are_rows_too(monkeypatch):
    """On few prompts, and after few requests: the same rows as on many."""
    monkeypatch.setattr(screen_cpu, "PRESCREENED", 20)
    monkeypatch.setattr(screen_cpu, "ROUNDS", 1)
    monkeypatch.setattr(memory, "FIRST", 10)
    monkeypatch.setattr(memory, "AT_ONCE", 10)
    arguments = argparse.Namespace(rows="memory,screens", requests=25)
    rows = path.measure(arguments, [])
    assert [row.label for row in rows] == [
        "prompt screen p99, 2,000 characters, ms",
        "prompt screen p50, 2,000 characters, ms",
        "stream screen per token, us",
        "stream screen per token of watched prompts, us",
        "memory after 25 requests against after 10",
        "memory after 25 requests, MB",
    ]
    assert all(float(row.value) > 0 for row in rows)


def test_a_row_that_there_is_not_is_named():
    """Nothing is measured before."""
    command = [sys.executable, "-m", "scripts.benchmarks", "path", "--rows", "path,speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "there is no speed; have path, screens, settlements, streams, memory" in done.stderr
