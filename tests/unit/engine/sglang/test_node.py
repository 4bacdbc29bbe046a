"""`tokenring node`: which ranks there are, and that they are started again until it is told to stop."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.cli.main import main, parser
from app.engine.sglang import node
from app.engine.sglang.args import SGLangOptions
from app.engine.sglang.node import check_rank, keep_running
from app.settings import EXIT_CONFIG, SettingsError

TWO = SGLangOptions(server_args={"nnodes": 2, "dist_init_addr": "10.0.0.1:5000"})


@pytest.mark.parametrize(("options", "rank"), [(TWO, 0), (TWO, 2), (TWO, -1), (SGLangOptions(), 1)])
def test_a_rank_that_does_not_exist_is_refused(options: SGLangOptions, rank: int) -> None:
    """The server itself is node 0, and one node has no other."""
    with pytest.raises(SettingsError, match=rf"rank {rank}: .* nnodes is [12]"):
        check_rank(options, rank)
    check_rank(TWO, 1)


def test_it_takes_the_settings_that_the_server_takes() -> None:
    """By flags too, and the rank besides."""
    args = parser().parse_args(["node", "--rank", "1", "--tp", "16", "--model", "/srv/m"])
    assert (args.rank, args.tp, args.model) == (1, "16", "/srv/m")


@pytest.fixture
def _signals() -> Iterator[None]:
    """The handlers of this process, put back."""
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)


@pytest.mark.usefixtures("_signals")
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT])
def test_ranks_that_end_are_started_again_until_a_signal(
    monkeypatch: pytest.MonkeyPatch, signum: signal.Signals
) -> None:
    """In the third start it is told to stop: the command ends with status 0."""
    starts = []

    def run_once(options: SGLangOptions, rank: int) -> int:
        starts.append((options, rank))
        if len(starts) == 3:
            os.kill(os.getpid(), signum)
        return -9

    monkeypatch.setattr(node, "_run_once", run_once)
    monkeypatch.setattr(node, "PAUSE_S", 0.0)
    with pytest.raises(SystemExit) as ended:
        keep_running(TWO, 1)
    assert ended.value.code == 0
    assert starts == [(TWO, 1)] * 3


@pytest.mark.usefixtures("_signals")
def test_settings_that_cannot_work_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another start would end in the same way."""
    monkeypatch.setattr(node, "_run_once", lambda _options, _rank: EXIT_CONFIG)
    assert keep_running(TWO, 1) == EXIT_CONFIG


def program(folder: Path, body: str) -> str:
    """A program in place of the interpreter, which first notes what it was told."""
    path = folder / "ranks"
    path.write_text(
        f"#!{sys.executable}\n"
        "import os, pathlib, signal, sys, time\n"
        f"pathlib.Path({str(folder / 'spec')!r}).write_text(sys.stdin.read())\n{body}\n"
    )
    path.chmod(0o700)
    return str(path)


def test_the_process_of_ranks_is_told_what_to_start(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On its standard input; the status is a signal where SGLang kills it."""
    monkeypatch.setattr(sys, "executable", program(tmp_path, "os.kill(os.getpid(), signal.SIGKILL)"))
    assert node._run_once(TWO, 1) == -signal.SIGKILL
    spec = json.loads((tmp_path / "spec").read_text())
    assert (spec["rank"], spec["parent"]) == (1, os.getpid())
    assert spec["options"]["server_args"] == dict(TWO.server_args)


@pytest.mark.usefixtures("_signals")
def test_a_signal_ends_the_process_of_ranks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Before the command has ended."""
    body = f"pathlib.Path({str(tmp_path / 'pid')!r}).write_text(str(os.getpid()))\n"
    body += f"os.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(60)"
    monkeypatch.setattr(sys, "executable", program(tmp_path, body))
    with pytest.raises(SystemExit):
        keep_running(TWO, 1)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_a_failure_of_the_ranks_process_leaves_its_traceback() -> None:
    """It ends at once, with status 1, whatever threads it has."""
    code = (
        "import threading\n"
        "from app.engine.parent_death import run_and_exit\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "run_and_exit(lambda: 1 // 0)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--engine", "scripted"], "engine: scripted has no ranks"),
        (["--model", "/srv/no such folder"], "model: there is no folder"),
    ],
)
def test_settings_that_have_no_ranks_are_refused_before_anything_starts(
    capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    """With status 78, as `serve` has for them."""
    assert main(["node", "--rank", "1", *flags]) == EXIT_CONFIG
    assert reason in capsys.readouterr().err
