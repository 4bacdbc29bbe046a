"""The time that a start of the engine may take, and what becomes of one that takes longer or fails."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from app.core import Health
from app.engine.sglang import engine as engine_module
from app.engine.sglang import run
from app.engine.sglang.args import SGLangOptions
from app.engine.sglang.engine import SGLangEngine
from app.engine.sglang.run import SGLangRun
from app.engine.supervise import RestartLimits
from app.errors import EngineFailed
from app.settings import SettingsError


@pytest.fixture
def freed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every start hangs, and notes that it has freed what it held."""
    noted: list[str] = []

    async def start(*_: Any, **__: Any) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            noted.append("freed")

    monkeypatch.setattr(SGLangRun, "start", start)
    return noted


async def test_a_first_start_that_hangs_fails_and_is_not_repeated(freed: list[str]) -> None:
    """What it held is freed before that is told."""
    engine = SGLangEngine(SGLangOptions(), limits=RestartLimits(start_s=0.01))
    with pytest.raises(EngineFailed, match="did not start: EngineFailed: the start hangs: it has taken 0 s"):
        await engine.start()
    assert (freed, engine.health()) == (["freed"], Health.DEAD)
    await engine.aclose()


async def test_a_launch_that_hangs_in_its_thread_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process of it can be killed to end it, as where a file system or a download stands still."""
    hangs, launched = threading.Event(), threading.Event()

    def launch(_: SGLangOptions) -> None:
        launched.set()
        hangs.wait(30)
        raise RuntimeError("too late")

    monkeypatch.setattr(run, "_launch", launch)
    monkeypatch.setattr(engine_module, "END_S", 0.05)
    engine = SGLangEngine(SGLangOptions(), limits=RestartLimits(start_s=0.05))
    try:
        async with asyncio.timeout(10):
            with pytest.raises(EngineFailed, match="the start hangs"):
                await engine.start()
        assert launched.wait(10)
        assert not hangs.is_set()
    finally:
        hangs.set()
        await engine.aclose()
    assert engine.health() is Health.DEAD


async def test_a_start_that_is_given_up_is_freed_too(freed: list[str]) -> None:
    """A cancelled start is no start that hangs."""
    engine = SGLangEngine(SGLangOptions(), limits=RestartLimits(start_s=0))
    starting = asyncio.create_task(engine.start())
    await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert freed == ["freed"]
    await engine.aclose()


@pytest.mark.parametrize("error", [RuntimeError("no GPU"), TimeoutError("no GPU")])
async def test_a_first_start_that_fails_says_why(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """A time-out of its own is no hang."""

    async def start(*_: Any, **__: Any) -> None:
        raise error

    monkeypatch.setattr(SGLangRun, "start", start)
    engine = SGLangEngine(SGLangOptions())
    with pytest.raises(EngineFailed, match=f"did not start: {type(error).__name__}: no GPU"):
        await engine.start()
    assert engine.health() is Health.DEAD
    await engine.aclose()


async def test_settings_that_cannot_work_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends with the status for settings."""

    async def start(*_: Any, **__: Any) -> None:
        raise SettingsError("tp")

    monkeypatch.setattr(SGLangRun, "start", start)
    engine = SGLangEngine(SGLangOptions())
    with pytest.raises(SettingsError):
        await engine.start()
    await engine.aclose()


@pytest.mark.parametrize(
    ("hang_s", "start_s", "max_s"),
    [(5.0, 1800.0, 95.0), (5.0, 60.0, 60.0), (5.0, 0.0, 95.0), (0.0, 1800.0, 1800.0), (0.0, 0.0, 0.0)],
)
def test_a_restart_has_three_times_the_last_start(hang_s: float, start_s: float, max_s: float) -> None:
    """And the limit of a hang, but no more than a start may take; with no limit of a hang, all of that."""
    engine = SGLangEngine(SGLangOptions(), limits=RestartLimits(hang_s=hang_s, start_s=start_s))
    engine.restarts.started(30.0)
    assert engine._max_restart_s() == max_s
