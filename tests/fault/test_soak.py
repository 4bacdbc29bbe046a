"""One round of `scripts/soak`: the server stopped and killed under clients; docs/inside/fault-tests.md."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(300)
def test_a_round_of_the_soak_finds_nothing():
    """With the scripted engine; a seed whose round has both a SIGTERM and a kill."""
    options = ["--engine", "scripted", "--minutes", "0.02", "--seed", "44", "--json"]
    command = [sys.executable, "-m", "scripts.crash.soak", *options]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-8000:]
    result = json.loads(run.stdout)
    assert result["violations"] == 0
    assert result["done"]["SIGTERM"]
    assert result["done"]["kill -9 of the server"]
    assert result["refusals"]["429 key_overloaded"]
    assert result["lives"] >= 3
