"""When a start hangs, by a clock that the test moves; and what becomes of one that does."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from app.engine.sglang import start_watchdog
from app.engine.sglang.start_watchdog import StartWatchdog, StartWork, Work, watched
from app.errors import EngineFailed

IDLE_S, LONGEST_S = 20.0, 300.0
NOTHING = Work(frozenset(), 0.0, 0)


class Start:
    """A start whose work the test sets."""

    def __init__(self, idle_s: float = IDLE_S, longest_s: float = LONGEST_S) -> None:
        self.now_s = 50.0
        self.work = NOTHING
        self.watchdog = StartWatchdog(idle_s, longest_s, lambda: self.work, lambda: self.now_s)

    def passes(self, seconds: int, cpu_share: float = 0.0, bytes_per_s: int = 0) -> tuple[float, str] | None:
        """Look every second, while one process works; when and why it hangs."""
        for number in range(1, seconds + 1):
            self.now_s += 1.0
            self.work = Work(frozenset({7}), self.work.cpu_s + cpu_share, self.work.num_bytes + bytes_per_s)
            if (reason := self.watchdog.look(self.work)) is not None:
                return float(number), reason
        return None


def test_processes_that_do_nothing_hang() -> None:
    """From their appearance on, and not sooner."""
    hangs = Start().passes(100)
    assert hangs == (IDLE_S + 1, "its processes have done nothing for 20.0 s")


@pytest.mark.parametrize(
    ("cpu_share", "bytes_per_s"),
    [(0.3, 0), (0.011, 0), (0.0, 100_000)],
    ids=["computes", "a little", "reads"],
)
def test_work_is_progress(cpu_share: float, bytes_per_s: int) -> None:
    """A start may take its time."""
    assert Start().passes(290, cpu_share, bytes_per_s) is None


def test_the_ticks_of_idle_threads_are_no_progress() -> None:
    """A process that waits takes a little time too, and its threads wake one another."""
    hangs = Start().passes(100, cpu_share=0.002, bytes_per_s=200)
    assert hangs is not None
    assert hangs[0] == IDLE_S + 1


def test_work_after_a_silence_is_progress() -> None:
    """The silence begins again after it."""
    start = Start()
    assert start.passes(19) is None
    assert start.passes(1, cpu_share=1.0) is None
    assert start.passes(19) is None
    assert start.passes(2) is not None


def test_a_new_process_is_progress() -> None:
    """A compiler, for one."""
    start = Start()
    assert start.passes(19) is None
    start.work = Work(frozenset({8}), 0.0, 0)
    start.now_s += 1.0
    assert start.watchdog.look(start.work) is None
    assert start.passes(19) is None


def test_before_its_processes_a_start_is_not_idle() -> None:
    """What the thread does that launches them is limited by the whole start alone."""
    start = Start()
    for _ in range(299):
        start.now_s += 1.0
        assert start.watchdog.look(start.work) is None
    start.now_s += 1.0
    assert start.watchdog.look(start.work) == "it has taken 300.0 s"


def test_a_start_that_only_computes_takes_too_long_in_the_end() -> None:
    """As ranks that wait for one another without rest."""
    assert Start().passes(1000, cpu_share=1.0) == (LONGEST_S, "it has taken 300.0 s")


@pytest.mark.parametrize(
    ("idle_s", "longest_s", "at_s"), [(0.0, LONGEST_S, LONGEST_S), (IDLE_S, 0.0, IDLE_S + 1)]
)
def test_each_limit_can_be_left_out(idle_s: float, longest_s: float, at_s: float) -> None:
    """The other one holds."""
    hangs = Start(idle_s, longest_s).passes(1000)
    assert hangs is not None
    assert hangs[0] == at_s


def test_a_process_that_stood_still_itself_waits_anew() -> None:
    """After a suspended machine the start goes on."""
    start = Start(longest_s=0.0)
    assert start.passes(10) is None
    start.now_s += 3600.0
    assert start.watchdog.look(start.work) is None
    assert start.passes(19) is None


async def test_where_processes_are_not_shown_only_the_whole_start_has_a_limit() -> None:
    """As with hidepid, or without accounting in the kernel; they are looked for off the event loop."""
    threads: list[threading.Thread] = []

    def refused() -> Work:
        threads.append(threading.current_thread())
        raise psutil.AccessDenied(1)

    now_s = itertools.count(0.0, 0.05)
    watchdog = StartWatchdog(0.2, 0.5, refused, lambda: next(now_s))
    assert (await watchdog.run()).startswith("it has taken 0.5")
    assert len(threads) > 1
    assert threading.main_thread() not in threads


class Hanging:
    """A watchdog's work with which a start hangs at the second look."""

    def __init__(self) -> None:
        self.looks = 0

    def watchdog(self) -> StartWatchdog:
        """A watchdog whose clock goes on with each look."""
        return StartWatchdog(0.001, 0.0, lambda: Work(frozenset({7}), 0.0, 0), self)

    def __call__(self) -> float:
        self.looks += 1
        return self.looks * 0.0001


async def test_a_start_that_hangs_is_cancelled_and_fails() -> None:
    """What it holds is freed before anybody hears of it."""
    freed = []

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            freed.append(True)

    with pytest.raises(EngineFailed, match="the start hangs: its processes have done nothing"):
        await watched(hang(), Hanging().watchdog())
    assert freed == [True]


async def test_a_start_that_frees_slowly_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch runs in a thread, and its processes are killed until that ends."""
    monkeypatch.setattr(start_watchdog, "END_S", 0.001)
    free, freed = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await free.wait()
            freed.set()

    with pytest.raises(EngineFailed):
        await watched(hang(), Hanging().watchdog())
    free.set()
    async with asyncio.timeout(5.0):
        await freed.wait()


async def test_a_start_that_is_done_is_returned() -> None:
    """Nobody looks at it any more."""

    async def start() -> str:
        return "run"

    assert await watched(start(), StartWatchdog(IDLE_S, LONGEST_S, lambda: NOTHING)) == "run"


async def test_a_start_that_fails_says_why() -> None:
    """The reason is its own."""

    async def fail() -> None:
        raise ValueError("no GPU")

    with pytest.raises(ValueError, match="no GPU"):
        await watched(fail(), StartWatchdog(IDLE_S, LONGEST_S, lambda: NOTHING))


async def test_a_cancelled_start_is_cancelled_before_that_is_told() -> None:
    """Its processes are gone when the engine is closed."""
    begun, freed = asyncio.Event(), []

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            freed.append(True)

    task = asyncio.create_task(watched(hang(), StartWatchdog(IDLE_S, LONGEST_S, lambda: NOTHING)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert freed == [True]


def test_the_work_of_new_processes_is_seen_and_a_stopped_one_does_none() -> None:
    """Processes that were there before do not count."""
    spin = [sys.executable, "-c", "print(flush=True)\nwhile True: pass"]
    older = subprocess.Popen(spin, stdout=subprocess.PIPE)
    work = StartWork("no such thread")
    newer = subprocess.Popen(spin, stdout=subprocess.PIPE)
    try:
        assert newer.stdout is not None
        newer.stdout.readline()
        first = work()
        assert first.pids == {newer.pid}
        while work().cpu_s <= first.cpu_s:
            pass
        os.kill(newer.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, newer.pid, os.WSTOPPED)
        assert work() == work()
    finally:
        for process in (older, newer):
            process.kill()
            process.communicate()
