"""`scripts/bench serve` as a whole, both sides being the ready-made app of `bench path`."""

import contextlib
import json
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
SIDE = shlex.join([sys.executable, "-m", "scripts.benchmarks.frames_app", "{port}", "400"])


def start(*options):
    """`bench serve` with the ready-made app on both sides."""
    sides = ["--ours-command", SIDE, "--peer-command", SIDE]
    command = [sys.executable, "-m", "scripts.benchmarks", "serve", *sides, *options]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.timeout(240)
def test_a_run_measures_both_sides_and_writes_what_it_printed(tmp_path):
    """Two starts, two loads: a table, a plot, and each run in the JSON file, whole and with equal tokens."""
    result, plot = tmp_path / "out" / "serve.json", tmp_path / "serve.svg"
    options = [
        "--streams",
        "2,4",
        "--pairs",
        "2",
        "--tokens",
        "200",
        "--json",
        str(result),
        "--plot",
        str(plot),
    ]
    with start(*options) as run:
        table, errors = run.communicate(timeout=230)
    assert run.returncode == 0, errors
    assert errors.count("starting ours") == errors.count("starting bare") == 2
    assert table.count("| CPU per output token, us |") == 2
    assert 'id="ratio_0"' in plot.read_text()
    written = json.loads(result.read_text())
    runs = written["runs"]
    assert [(one["streams"], one["start"], one["pair"], one["server"]) for one in runs] == [
        (streams, pair, pair, server) for streams in (2, 4) for pair in (0, 1) for server in ("ours", "bare")
    ]
    for ours, peer in zip(runs[::2], runs[1::2], strict=True):
        assert ours["output_tokens"] == peer["output_tokens"] > 0
        assert ours["frames_per_token"] == peer["frames_per_token"] == 1.0
        assert ours["serving_cpu_us_per_token"] > 0
        assert 0 < ours["ttft_p50_ms"] <= ours["ttft_p99_ms"]


@pytest.mark.timeout(240)
def test_a_run_cut_short_tells_what_it_has_and_leaves_no_server():
    """SIGTERM after the first pair: the table of that pair, and both servers gone, the frozen one too."""
    with start("--streams", "2", "--pairs", "1000", "--tokens", "200") as run:
        for line in run.stderr:
            if "pair 1:" in line:
                break
        servers = []
        for child in psutil.Process(run.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # the load generator of a pair ends by itself
                servers += [child] * ("scripts.benchmarks.frames_app" in child.cmdline())
        assert len(servers) == 2
        run.send_signal(signal.SIGTERM)
        table, _ = run.communicate(timeout=110)
    assert run.returncode == 128 + signal.SIGTERM
    assert "| output tokens/s" in table
    assert not any(server.is_running() for server in servers)
