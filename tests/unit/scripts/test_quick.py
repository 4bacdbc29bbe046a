"""`scripts/bench --quick`: one table of what `serve` and `path` found, and how far to trust it."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from scripts.benchmarks import __main__, path, serve
from scripts.benchmarks.driver import RunResult
from scripts.benchmarks.findings import within


def run_of(server: str, other_cpus: float) -> RunResult:
    """A run whose figures are all 1."""
    numbers: dict[str, Any] = {field.name: 1.0 for field in dataclasses.fields(RunResult)}
    return RunResult(
        **{**numbers, "server": server, "streams": 16, "other_cpus": other_cpus, "text_sha256": ["a"]}
    )


@pytest.mark.parametrize(("other_cpus", "machine"), [(0.1, "a quiet machine"), (1.5, "a BUSY machine")])
def test_a_bound_that_is_missed_is_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], other_cpus: float, machine: str
):
    """The status is 0, the rows of both are in one table, and the last line names the machine's load."""

    def serve_measure(_options: object, measured: serve.Measured) -> None:
        measured.commands = {"ours": [], "bare": []}
        runs = {name: run_of(name, other_cpus) for name in ("ours", "bare")}
        measured.turns[16] = [serve.Turn(0, runs), serve.Turn(0, runs)]

    def path_measure(_options: object, turns: path.Turns) -> list[Any]:
        turns.append({name: run_of(name, 0.0) for name in ("ours", "screens off", "ready-made")})
        return [within("stream screen per token, us", 20.0, 15.0)]

    monkeypatch.setattr(serve, "measure", serve_measure)
    monkeypatch.setattr(path, "measure", path_measure)
    monkeypatch.setattr("sys.argv", ["bench", "--quick"])
    assert __main__.main() == 0
    printed = capsys.readouterr().out
    assert printed.count("| figure") == 1
    assert "CPU per output token, us, 16 streams, against bare" in printed
    assert "stream screen per token, us" in printed
    assert machine in printed.splitlines()[-1]
