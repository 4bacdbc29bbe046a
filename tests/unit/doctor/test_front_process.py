"""Doctor's look at a running server: whether its event loop is what limits it."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from app.doctor import front_process
from app.doctor.front_process import event_loop, main_thread_s
from app.store.opening import Holder


@pytest.fixture
def used(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server on the data directory, whose main thread uses so many seconds in the one that is watched."""

    def have(seconds: float) -> None:
        readings: Iterator[float] = iter((7.0, 7.0 + seconds))
        monkeypatch.setattr(front_process, "holder", lambda _: Holder(4711))
        monkeypatch.setattr(front_process, "main_thread_s", lambda _: next(readings))
        monkeypatch.setattr(time, "sleep", lambda _: None)

    return have


@pytest.mark.parametrize(
    ("seconds", "status"), [(0.1, "ok"), (0.84, "ok"), (0.9, "warning"), (1.0, "warning")]
)
def test_a_loop_that_fills_its_core_is_a_warning(fake: Any, used: Any, seconds: float, status: str) -> None:
    """It names the share, and that the engine is not the limit."""
    used(seconds)
    finding = event_loop(fake.subject)
    assert finding.status == status
    assert f"{seconds:.0%} of a core" in finding.detail
    assert ("not the engine" in finding.detail) == (status == "warning")
    assert bool(finding.advice) == (status == "warning")


def test_nothing_is_watched_without_a_server_or_before_a_start(fake: Any, used: Any) -> None:
    """No second is lost, and a server that has just failed to start is not looked at."""
    assert event_loop(fake.subject).status == "not_applicable"
    used(1.0)
    fake.starting = True
    assert event_loop(fake.subject).status == "not_applicable"


def test_the_main_thread_alone_is_counted() -> None:
    """The encoder's and the writer's threads are not the loop; a process that is gone counts nothing."""

    def burn() -> None:
        end_s = time.thread_time() + 0.2
        while time.thread_time() < end_s:
            pass

    before_s = main_thread_s(os.getpid())
    thread = threading.Thread(target=burn)
    thread.start()
    thread.join()
    assert main_thread_s(os.getpid()) - before_s < 0.1
    burn()
    assert main_thread_s(os.getpid()) - before_s > 0.15
    assert main_thread_s(2**30) == 0.0
