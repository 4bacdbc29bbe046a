"""The server killed by SIGKILL under load, and started on the same data (docs/inside/crash-safety.md).

And one round of `scripts/soak`: stopped and killed under clients (docs/inside/fault-tests.md).
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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


def soak(*options):
    """`scripts/soak` with these options: its result. It fails where anything did not hold."""
    command = [sys.executable, "-m", "scripts.crash.soak", *options, "--json"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr[-8000:]
    return json.loads(run.stdout)


@pytest.fixture(scope="module")
def scripted(tmp_path_factory):
    """Both with the scripted engine: begun at once, as they mostly wait. What each gave, by its name."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        folder = tmp_path_factory.mktemp("crash")
        # The seed's round has both a SIGTERM and a kill.
        one_round = ["--engine", "scripted", "--minutes", "0.02", "--seed", "44"]
        yield {
            "crash": pool.submit(crash, folder, "--kills", "8", "--longest-s", "3"),
            "soak": pool.submit(soak, *one_round),
        }


@pytest.mark.timeout(600)
def test_eight_kills_leave_true_streams_and_balanced_books(scripted):
    """8 kills under 20 streams: nothing left open, nothing billed twice, every client told the truth.

    `scripts/crashtest` has 300.
    """
    result = scripted["crash"].result()
    assert result["violations"] == []
    assert result["ends"]["interrupted"] > 40
    assert result["ends"]["length"] > 20
    assert 0 < result["worst_shortfall_s"] < 1.5
    assert result["most_billed_beyond_received_tokens"] == 0


@pytest.mark.timeout(600)
def test_a_round_of_the_soak_finds_nothing(scripted):
    """Stopped and killed under clients of every kind."""
    result = scripted["soak"].result()
    assert result["violations"] == 0
    assert result["done"]["SIGTERM"]
    assert result["done"]["kill -9 of the server"]
    assert result["refusals"]["429 key_overloaded"]
    assert result["lives"] >= 3


@pytest.mark.sglang
@pytest.mark.timeout(600)
def test_a_kill_of_real_sglang(tmp_path):
    """The same with the real engine, whose processes go with the server; killed after 4 s of traffic."""
    result = crash(tmp_path, "--kills", "1", "--seed", "14", "--engine", "sglang")
    assert result["violations"] == []
    assert result["ends"]["interrupted"] > 0
