"""`scripts/bench store` as a whole, on little."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*options):
    """What a benchmark printed, once it has ended well."""
    command = [sys.executable, "-m", "scripts.benchmarks", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=230, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(240)
def test_bench_store_asks_a_store_and_settles_in_it(tmp_path):
    """A row for each question, with its bound; each round settled all that it had, in batches and alone."""
    result = tmp_path / "store.json"
    size = ["--rows", "2000", "--conversations", "300", "--long", "40", "--repeat", "2"]
    rounds = ["--pairs", "2", "--settlements", "640", "--in-flight", "64"]
    table = bench("store", *size, *rounds, "--folder", str(tmp_path), "--json", str(result))
    assert "| usage by day and model, of all owners | 124 |" in table
    assert table.count("| < 50 |") == 2 + 9
    assert "settlements/s" in table
    written = json.loads(result.read_text())
    assert {item["rows"] for item in written["questions"] if "page" in item["label"]} == {20}
    assert [(run["streams"], run["settlements"]) for run in written["runs"]] == [(64, 640), (1, 64)] * 4
    for together, alone in zip(written["runs"][::2], written["runs"][1::2], strict=True):
        assert together["per_commit"] > 50
        assert alone["per_commit"] == 1
    assert list(tmp_path.iterdir()) == [result]
