"""`scripts/bench overload`, `fairness`, `limits` and `herd` as a whole, short, with the scripted engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
WRONG_STATUS = "attempts that ended in anything but 200, 429, 503"
NO_TIME = "refusals without Retry-After, or with more than 120 s"
RETRACTED = "requests that the engine retracted"
HURRIED = """
import sys
from scripts.benchmarks import __main__, fairness, herd, overload
fairness.STEP_S, herd.WINDOW_S, overload.BIN_S = 2.0, 1.0, 1.0
sys.exit(__main__.main())
"""


def bench(folder: Path, *options: str) -> tuple[str, dict[str, dict[str, Any]]]:
    """The table that was printed, and the findings of the JSON file by their label."""
    result = folder / "result.json"
    own = ["--engine", "scripted", "--setting", "resume_grace_s=0.2", "--json", result]
    command = [sys.executable, "-c", HURRIED, *options, *own]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)
    assert result.exists(), done.stderr
    written = json.loads(result.read_text())
    assert done.returncode == any(one["verdict"] == "missed" for one in written["findings"])
    return done.stdout, {one["label"]: one for one in written["findings"]}


@pytest.mark.timeout(120)
def test_an_overload_is_found_made_and_told(tmp_path: Path) -> None:
    """A few seconds: refusals are honest, nothing breaks, and what is asked is in the table."""
    times = ["--clients", "8,24", "--search", "1", "--alone", "2", "--seconds", "6", "--keys", "3"]
    table, found = bench(tmp_path, "overload", *times)
    assert [found[label]["verdict"] for label in (WRONG_STATUS, NO_TIME, RETRACTED)] == ["met"] * 3
    assert int(found["answers 200"]["value"]) > 20
    assert any(label.startswith(("answers 429", "answers 503")) for label in found)
    assert "good answers/s, over those without overload" in table


@pytest.mark.timeout(120)
def test_fairness_is_measured_both_ways(tmp_path: Path) -> None:
    """One turn of the light key, and some seconds of two backlogged ones."""
    times = ["--light", "4", "--turns", "1", "--seconds", "4", "--backlog", "20"]
    table, found = bench(tmp_path, "fairness", *times)
    assert found["light key: requests alone, beside the flood"]["value"] == "4, 4"
    assert found["of them not answered"]["verdict"] == "met"
    assert "TTFT p99, beside/alone" in table
    assert float(found["served tokens apart"]["value"]) < 0.5, "how fair it is, takes minutes"


@pytest.mark.timeout(120)
def test_a_key_s_tokens_of_a_minute_are_added_up(tmp_path: Path) -> None:
    """Of sixty at once some are served; what they took together is within the limit."""
    times = ["--clients", "60", "--tpm", "2000", "--seconds", "3"]
    _, found = bench(tmp_path, "limits", *times)
    assert [found[label]["verdict"] for label in (WRONG_STATUS, NO_TIME)] == ["met"] * 2
    most = found["most tokens of requests that came within a minute"]
    assert most["verdict"] == "met"
    assert 1000 < int(most["value"]) <= 2000
    assert int(found["answers 429 rate_limit_exceeded"]["value"]) > 20


@pytest.mark.timeout(120)
@pytest.mark.parametrize("at", ["ready", "port"])
def test_a_herd_is_met_after_a_restart(tmp_path: Path, at: str) -> None:
    """Some hundred at once, as soon as it is ready or only its port answers: none breaks."""
    times = [
        "--steady",
        "2",
        "--watch",
        "4",
        "--requests",
        "300",
        "--at",
        at,
        "--obeying",
        "1",
        "--keys",
        "3",
    ]
    _, found = bench(tmp_path, "herd", *times)
    assert [found[label]["verdict"] for label in (WRONG_STATUS, NO_TIME, RETRACTED)] == ["met"] * 3
    assert int(found["answers 200"]["value"]) > 10
