"""`scripts/bench overload`, `fairness`, `limits` and `herd` as a whole, short, with the scripted engine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
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


Measured = tuple[str, dict[str, dict[str, Any]]]


def bench(folder: Path, *options: str) -> Measured:
    """The table that was printed, and the findings of the JSON file by their label."""
    result = folder / "result.json"
    own = ["--engine", "scripted", "--setting", "resume_grace_s=0.2", "--json", result]
    command = [sys.executable, "-c", HURRIED, *options, *own]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert result.exists(), done.stderr
    written = json.loads(result.read_text())
    assert done.returncode == any(one["verdict"] == "missed" for one in written["findings"])
    return done.stdout, {one["label"]: one for one in written["findings"]}


HERD = ("herd", "--steady", "2", "--watch", "4", "--requests", "300", "--obeying", "1", "--keys", "3", "--at")
RUNS: dict[str, tuple[str, ...]] = {
    "overload": (
        *("overload", "--clients", "8,24", "--search", "1", "--alone", "2"),
        *("--seconds", "6", "--keys", "3"),
    ),
    "fairness": ("fairness", "--light", "4", "--turns", "1", "--seconds", "4", "--backlog", "20"),
    "limits": ("limits", "--clients", "60", "--tpm", "2000", "--seconds", "3"),
    "herd at ready": (*HERD, "ready"),
    "herd at port": (*HERD, "port"),
}


@pytest.fixture(scope="module")
def measure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Measured]]:
    """The result of a run; two are made at a time, as they mostly wait, from the first one asked for on."""
    with ThreadPoolExecutor(max_workers=2) as pool:
        runs = {
            name: pool.submit(bench, tmp_path_factory.mktemp("bench"), *options)
            for name, options in RUNS.items()
        }
        yield lambda name: runs[name].result()
        for run in runs.values():
            run.cancel()


@pytest.mark.timeout(240)
def test_an_overload_is_found_made_and_told(measure: Callable[[str], Measured]) -> None:
    """A few seconds: refusals are honest, nothing breaks, and what is asked is in the table."""
    table, found = measure("overload")
    assert [found[label]["verdict"] for label in (WRONG_STATUS, NO_TIME, RETRACTED)] == ["met"] * 3
    assert int(found["answers 200"]["value"]) > 20
    assert any(label.startswith(("answers 429", "answers 503")) for label in found)
    assert "good answers/s, over those without overload" in table


@pytest.mark.timeout(240)
def test_fairness_is_measured_both_ways(measure: Callable[[str], Measured]) -> None:
    """One turn of the light key, and some seconds of two backlogged ones."""
    table, found = measure("fairness")
    assert found["light key: requests alone, beside the flood"]["value"] == "4, 4"
    assert found["of them not answered"]["verdict"] == "met"
    assert "TTFT p99, beside/alone" in table
    assert float(found["served tokens apart"]["value"]) < 0.5, "how fair it is, takes minutes"


@pytest.mark.timeout(240)
def test_a_key_s_tokens_of_a_minute_are_added_up(measure: Callable[[str], Measured]) -> None:
    """Of sixty at once some are served; what they took together is within the limit."""
    _, found = measure("limits")
    assert [found[label]["verdict"] for label in (WRONG_STATUS, NO_TIME)] == ["met"] * 2
    most = found["most tokens of requests that came within a minute"]
    assert most["verdict"] == "met"
    assert 1000 < int(most["value"]) <= 2000
    assert int(found["answers 429 rate_limit_exceeded"]["value"]) > 20


@pytest.mark.timeout(240)
@pytest.mark.parametrize("at", ["ready", "port"])
def test_a_herd_is_met_after_a_restart(measure: Callable[[str], Measured], at: str) -> None:
    """Some hundred at once, as soon as it is ready or only its port answers: none breaks."""
    _, found = measure(f"herd at {at}")
    assert [found[label]["verdict"] for label in (WRONG_STATUS, NO_TIME, RETRACTED)] == ["met"] * 3
    assert int(found["answers 200"]["value"]) > 10
