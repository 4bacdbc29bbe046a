"""`scripts/bench path` as a whole, on little."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(120)
def test_every_row_that_needs_no_engine_is_measured(tmp_path):
    """The path, both of its loads, against ready-made frames and itself without screens; and the others."""
    result = tmp_path / "path.json"
    options = ["--rows", "path,screens,settlements,memory", "--streams", "2,256", "--pairs", "1"]
    options += ["--tokens", "10", "--rounds", "1", "--requests", "1100", "--json", str(result)]
    command = [sys.executable, "-m", "scripts.benchmarks", "path", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
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
        "prompt screen p99, 2,000 characters, ms",
        "prompt screen p50, 2,000 characters, ms",
        "stream screen per token, us",
        "stream screen per token of watched prompts, us",
        "durable settlements per second, 64 at once, against one commit each",
        "memory after 1,100 requests against after 1,000",
        "memory after 1,100 requests, MB",
    ]
    assert done.stdout.count("█") > 6


def test_a_row_that_there_is_not_is_named():
    """Nothing is measured before."""
    command = [sys.executable, "-m", "scripts.benchmarks", "path", "--rows", "path,speed"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert "there is no speed; have path, screens, settlements, streams, memory" in done.stderr
