"""`scripts/bench store` and `scripts/bench ledger` as wholes, on little."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from app.engine.scripted.engine import Script
from app.settings import Settings
from scripts.benchmarks.ledger_off import RuntimeWithoutLedger
from tests.support import servers

ROOT = Path(__file__).parents[2]


def bench(*options):
    """What a benchmark printed, once it has ended well."""
    command = [sys.executable, "-m", "scripts.benchmarks", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(120)
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


@pytest.mark.timeout(120)
def test_bench_ledger_compares_two_servers_of_which_one_writes_nothing(tmp_path):
    """Both answer every request whole; the table has the times of both."""
    result = tmp_path / "ledger.json"
    load = ["--streams", "4", "--pairs", "2", "--rounds", "1", "--tokens", "8", "--rate", "200"]
    table = bench("ledger", *load, "--prefill-ms", "20", "--json", str(result))
    assert "prefill 20 ms" in table
    runs = json.loads(result.read_text())["runs"]
    assert [(run["pair"], run["server"]) for run in runs] == [
        (pair, side) for pair in (0, 1) for side in ("on", "off")
    ]
    for on, off in zip(runs[::2], runs[1::2], strict=True):
        assert on["output_tokens"] == off["output_tokens"] > 0
        assert min(on["ttft_p50_ms"], off["ttft_p50_ms"]) > 20


async def test_the_server_without_a_ledger_answers_and_writes_nothing(tmp_path, monkeypatch):
    """Otherwise it would be no measure of what the ledger costs."""
    monkeypatch.setattr(servers, "Runtime", RuntimeWithoutLedger)
    settings = Settings(port=0, data_dir=tmp_path, safety="off")  # which has records of its own
    served = await servers.serve_here(Script(tokens=5), settings)
    try:
        response = await served.post(servers.chat())
        assert response.status == 200
        assert response.body.endswith(b"data: [DONE]\n\n")
        assert served.runtime.database.num_units == 1  # what reconciles at the start
    finally:
        await served.close()
