"""`scripts/gpu_check`: stages as processes with limits, what they found, and a run that goes on."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import pytest

from scripts.benchmarks.findings import Finding
from scripts.benchmarks.machine import ROOT
from scripts.gpu import driver, report, stage, tools
from scripts.gpu.state import Checkup, Options, StageRecord, State
from scripts.gpu.tools import ToolFailed, run_tool

HEAD = """
import sys, pathlib, time, signal, subprocess
from scripts.gpu.state import State, Checkup
from scripts.benchmarks.findings import none_of, unjudged
out, name, work, limit = sys.argv[1:]
state = State.load(pathlib.Path(out))
check = Checkup(state, name, pathlib.Path(work), float(limit))
"""
PASSES = "check.find(unjudged('speed', 7)); (check.work / 'server.log').write_text('served\\n')"
MISSES = "check.find(none_of('violations', 3))"
BREAKS = "check.keep('before', 1); sys.exit(1)"
HANGS = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
child = subprocess.Popen(['sleep', '300'], start_new_session=True)
child.send_signal(signal.SIGSTOP)
check.keep('child', child.pid)
time.sleep(300)
"""


@pytest.fixture(autouse=True)
def short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stage that does not end by itself is given half a second."""
    monkeypatch.setattr(driver, "GRACE_S", 0.5)
    monkeypatch.setattr(driver, "LEAST_S", dict.fromkeys(("machine", "start", "kill"), 1.0))


def run(
    out: Path, codes: dict[str, str], *, asked_for: bool = False, limit_s: float = 30.0, **plan: Any
) -> tuple[int, State]:
    """One run of those stages, by what each does; its status, and what was written."""
    state = State.resumed(out, plan.pop("options", Options()))
    state.save()
    by_name = f"codes = {codes!r}\nexec(codes[name])"
    budget_s = plan.pop("budget_s", 600.0)
    made = driver.Plan(list(codes), asked_for, limit_s, budget_s)
    status = driver.Driver(state, made, ("-c", HEAD + by_name)).run()
    return status, State.load(out)


def test_stages_run_in_order_and_the_page_has_what_they_found(tmp_path: Path):
    """One that passes gives 0; findings, options and logs are in the folder."""
    options = Options(model="builtin", engine_args={"attention_backend": "triton"}, commit="abc")
    status, state = run(tmp_path, {"machine": PASSES, "start": PASSES}, options=options)
    assert status == 0
    assert list(state.records) == ["machine", "start"]
    assert [record.status for record in state.records.values()] == ["passed", "passed"]
    page = (tmp_path / report.FILE_NAME).read_text()
    assert "| speed" in page
    assert "`attention_backend=triton`" in page
    assert "Commit abc" in page
    assert (tmp_path / "logs.txt").read_text().count("served") == 2


def test_what_is_missed_or_breaks_does_not_keep_the_next_from_running(tmp_path: Path):
    """The status is 1; a missed bound is `missed`, an end before the end `failed` with what was found."""
    status, state = run(tmp_path, {"machine": MISSES, "start": BREAKS, "kill": PASSES})
    assert status == 1
    assert [record.status for record in state.records.values()] == ["missed", "failed", "passed"]
    assert state.records["start"].facts == {"before": 1}
    assert "status 1" in state.records["start"].error


def test_a_stage_that_hangs_is_ended_with_all_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """It ignores SIGTERM, and its child is frozen and in a session of its own: both are gone in time."""

    def has_ended(process: subprocess.Popen[Any], limit_s: float) -> bool:
        """The limit counts from where the stage hangs; the other one has all the time it needs."""
        if "kill" in process.args:
            return tools.has_ended(process, 30.0)
        while process.poll() is None and "child" not in State.load(tmp_path).records["start"].facts:
            time.sleep(0.02)
        return tools.has_ended(process, limit_s)

    monkeypatch.setattr(driver, "has_ended", has_ended)
    status, state = run(tmp_path, {"start": HANGS, "kill": PASSES}, limit_s=2.0)
    assert status == 1
    hung = state.records["start"]
    assert hung.status == "timed out"
    assert 1 < hung.seconds < 60
    assert "2 s" in hung.error
    assert not psutil.pid_exists(hung.facts["child"])
    assert state.records["kill"].status == "passed"


def test_a_second_run_does_what_is_left(tmp_path: Path):
    """Finished stages stay as they are unless they are named; those that failed run again."""
    run(tmp_path, {"machine": PASSES, "start": BREAKS})
    status, state = run(tmp_path, {"machine": BREAKS, "start": MISSES})
    assert status == 1
    assert [state.records[name].status for name in ("machine", "start")] == ["passed", "missed"]
    _, state = run(tmp_path, {"machine": BREAKS}, asked_for=True)
    assert state.records["machine"].status == "failed"
    assert state.records["start"].status == "missed"


def test_results_of_other_options_are_not_gone_on_with(tmp_path: Path):
    """Another model or commit begins anew."""
    run(tmp_path, {"machine": PASSES})
    assert State.resumed(tmp_path, Options()).finished("machine")
    assert State.resumed(tmp_path, Options(commit="other")).records == {}


def test_what_does_not_fit_into_the_budget_is_skipped(tmp_path: Path):
    """It says how much was left, and the next run does it."""
    status, state = run(tmp_path, {"machine": PASSES}, budget_s=1.4)
    assert status == 1
    assert state.records["machine"].status == "skipped"
    assert "1 s are left" in state.records["machine"].error
    assert run(tmp_path, {"machine": PASSES})[0] == 0


def test_where_the_product_is_not_installed_it_has_a_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A node that has our packages, but no installation of ours, serves: routes ask for a version."""
    monkeypatch.setattr(driver, "_is_installed", lambda: False)
    monkeypatch.setenv("PYTHONPATH", "/elsewhere")
    path = driver.environment(tmp_path)["PYTHONPATH"].split(":")
    assert path[:2] == [str(ROOT), "/elsewhere"]
    (found,) = metadata.distributions(name="tokenring", path=path[2:])
    assert found.version == "0"
    assert [point.name for point in found.entry_points] == ["tokenring_cpu"]


def test_a_stage_that_raises_leaves_the_end_of_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """What was found before stays, and the status is 1."""

    def breaks(check: Checkup) -> None:
        check.find(Finding("before", "1"))
        raise RuntimeError("x" * 10_000 + " no memory")

    state = State(tmp_path, Options(), {"start": StageRecord()})
    state.save()
    monkeypatch.setattr(stage, "die_with_parent", lambda _parent: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setitem(stage.RUNS, "start", breaks)
    monkeypatch.setattr(sys, "argv", ["stage", str(tmp_path), "start", str(tmp_path), "60"])
    assert stage.main() == 1
    record = State.load(tmp_path).records["start"]
    assert record.error.endswith("no memory\n")
    assert len(record.error) == stage.ERROR_CHARS
    assert record.findings == [Finding("before", "1")]


def test_every_stage_has_a_place_in_the_order():
    """The names on the command line are those that can run."""
    assert set(stage.RUNS) == {"machine", "paths", "start", "contract", "kill", "load", "bench"}


def test_a_tool_is_heard_as_it_goes_and_ended_at_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Lines of both streams arrive; what it prints is the result; past the limit its log's end is told."""
    monkeypatch.setattr("scripts.gpu.tools.END_S", 0.5)
    lines: list[str] = []
    code = "import sys; print('out'); print('err', file=sys.stderr)"
    assert run_tool(["-c", code], 30, tmp_path / "a.log", on_line=lines.append) == "out\n"
    assert sorted(lines) == ["err", "out"]
    code = "import time; print('begun', flush=True); time.sleep(300)"
    with pytest.raises(ToolFailed, match=r"(?s)ran past 2 s.*begun"):
        run_tool(["-c", code], 2, tmp_path / "b.log")
    with pytest.raises(ToolFailed, match="status 3"):
        run_tool(["-c", "raise SystemExit(3)"], 30, tmp_path / "c.log")
