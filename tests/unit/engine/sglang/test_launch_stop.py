"""The orderly stop of an engine: who is asked to end, and what is told of those that had to be killed."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

import pytest
from structlog.testing import capture_logs

from app.engine.sglang.platform import prepare_process
from app.engine.sglang.run import SGLangRun

if TYPE_CHECKING:
    from app.engine.sglang.launch import Launched

pytestmark = [pytest.mark.sglang, pytest.mark.filterwarnings("ignore")]  # of what SGLang imports


def launched(folder: Path, *, pp: int = 1, pids: tuple[int, ...] = ()) -> Launched:
    """An engine without processes of its own, but with the schedulers of a test."""
    prepare_process()
    from app.engine.sglang.launch import Launched

    own: dict[str, Any] = dict.fromkeys(Launched.__dataclass_fields__, 1)
    load_file = folder / "load"
    own |= {"manager": mock.Mock(), "processes": (), "scheduler_pids": pids, "pp": pp, "load_file": load_file}
    return Launched(**own)


@pytest.mark.parametrize(("pp", "asked"), [(1, True), (2, False)])
def test_pipeline_stages_are_not_asked_to_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pp: int, asked: bool
) -> None:
    """Their loops never end, so that the stop would wait 15 s in vain."""
    engine = launched(tmp_path, pp=pp)
    monkeypatch.setattr("app.engine.sglang.launch.needs_cpu_platform", lambda: False)
    assert engine.ask_to_end() is asked
    assert engine.manager._dispatch_to_scheduler.called is asked


def test_a_stop_says_how_many_schedulers_did_not_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one that has ended, one that has not, and one that is gone."""
    monkeypatch.setattr("app.engine.sglang.launch.RELEASE_TIMEOUT_S", 0.2)
    ended = subprocess.Popen([sys.executable, "-S", "-c", ""])
    alive = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.waitid(os.P_PID, ended.pid, os.WEXITED | os.WNOWAIT)
        engine = launched(tmp_path, pids=(ended.pid, alive.pid, 2**22 + 1))
        assert engine.stop(asked=True) == 1
        assert engine.stop() == 0
    finally:
        for process in (ended, alive):
            process.kill()
            process.communicate()


async def closed(*, asks: Any, num_left: int) -> tuple[mock.Mock, list[Any]]:
    """Close a run with such an engine; the engine, and the log."""
    engine = mock.Mock(processes=(), replicas=1)
    engine.ask_to_end, engine.stop = asks, mock.Mock(return_value=num_left)
    engine.manager.stop = mock.AsyncMock()
    run = SGLangRun.__new__(SGLangRun)
    with ThreadPoolExecutor(1) as thread, capture_logs() as log:
        state = SimpleNamespace(launched=engine, _thread=thread, _is_lost=False, disconnect=mock.Mock())
        run.__dict__.update(vars(state))
        await asyncio.gather(run.aclose(), return_exceptions=True)
    return engine, log


async def test_schedulers_that_had_to_be_killed_are_in_the_log() -> None:
    """With their number; an orderly end leaves no line."""
    _, log = await closed(asks=lambda: True, num_left=2)
    assert [(line["event"], line["log_level"], line["schedulers"]) for line in log] == [
        ("schedulers_killed", "warning", 2)
    ]
    _, log = await closed(asks=lambda: True, num_left=0)
    assert log == []


async def test_an_engine_that_cannot_be_asked_is_stopped_all_the_same() -> None:
    """Whatever the send raises, its processes end."""
    engine, _ = await closed(asks=mock.Mock(side_effect=RuntimeError("no socket")), num_left=0)
    engine.stop.assert_called_once_with(asked=False)
