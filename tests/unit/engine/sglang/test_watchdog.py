"""When an engine or a start hangs, by a clock that the test moves; and what becomes of a start that does."""

from __future__ import annotations

import asyncio
import itertools
import threading

import psutil
import pytest

from app.engine.sglang import watchdog
from app.engine.sglang.process_work import Work
from app.engine.sglang.watchdog import PATIENCE, HangWatchdog, Progress, StartWatchdog
from app.errors import EngineFailed

HANG_S = 8.0


class Watched:
    """A watchdog over an engine whose progress the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.seen = Progress(1, 0, "load")
        self.hangs: list[float] = []
        self.compiled_s = 100.0
        self.watchdog = HangWatchdog(
            HANG_S,
            lambda: self.seen,
            self.hangs.append,
            lambda: self.now_s,
            compiled_s=lambda: self.compiled_s,
        )

    def passes(self, seconds: float, step_s: float = 1.0, compilers: float = 0.0) -> float | None:
        """Look every second, while compilers take that share of a core; after how many it hung."""
        for number in range(1, int(seconds / step_s) + 1):
            self.now_s += step_s
            self.compiled_s += compilers * step_s
            if self.watchdog.look(self.compiled_s if self.watchdog.is_silent else None):
                return number * step_s
        return None


def test_an_engine_that_says_nothing_while_choices_are_open_hangs() -> None:
    """After the set time from the first look on, and not sooner."""
    watched = Watched()
    assert watched.passes(60) == pytest.approx(HANG_S + 1)
    assert watched.hangs == [HANG_S]


def test_output_is_progress() -> None:
    """One batch in time is enough."""
    watched = Watched()
    for number in range(10):
        watched.seen = Progress(1, number, "load")
        assert watched.passes(HANG_S - 1) is None


def test_an_idle_engine_does_not_hang() -> None:
    """Nobody waits for anything, and the first request has all the time."""
    watched = Watched()
    watched.seen = Progress(0, 3, "load")
    assert watched.passes(1000) is None
    watched.seen = Progress(2, 3, "load")
    assert watched.passes(60) == pytest.approx(HANG_S + 1)


def test_a_load_that_changes_buys_patience_and_not_for_ever() -> None:
    """A long prefill says nothing for longer; a dead detokenizer beside a live scheduler is found too."""
    watched = Watched()
    hung_s = None
    for number in range(100):
        watched.seen = Progress(1, 0, number)
        if watched.passes(1):
            hung_s = number + 1
            break
    assert hung_s == pytest.approx(PATIENCE * HANG_S + 1)


def test_a_process_that_stood_still_itself_reads_before_it_judges() -> None:
    """After a suspended machine, what the engine said meanwhile is still to be read."""
    watched = Watched()
    assert watched.passes(3) is None
    watched.now_s += 3600
    assert not watched.watchdog.look(None)
    assert watched.passes(60) == pytest.approx(HANG_S)


def test_an_engine_whose_kernels_are_compiled_does_not_hang() -> None:
    """However long that takes; when the compilers are done, it has all the time again."""
    watched = Watched()
    assert watched.passes(100 * HANG_S, compilers=0.05) is None
    hung_s = watched.passes(60)
    assert hung_s is not None
    assert HANG_S / 2 < hung_s <= HANG_S


def test_a_compiler_that_waits_is_no_work() -> None:
    """As one that waits for a lock for ever."""
    watched = Watched()
    assert watched.passes(3 * HANG_S, compilers=0.05) is None
    assert watched.passes(60, compilers=0.002) is not None


def test_compilers_that_ended_before_a_silence_do_not_count() -> None:
    """Their time is no progress of the engine that is silent now."""
    watched = Watched()
    for number in range(5):
        watched.seen = Progress(1, number, "load")
        assert watched.passes(1, compilers=1.0) is None
    assert watched.passes(60) == pytest.approx(HANG_S)


async def test_compilers_are_asked_for_off_the_event_loop() -> None:
    """Reading the table of processes takes longer than a token may."""
    threads: list[threading.Thread] = []

    def compiled_s() -> float:
        threads.append(threading.current_thread())
        return 0.0

    now_s, hangs = itertools.count(0.0, 0.01), list[float]()
    looking = HangWatchdog(
        0.1, lambda: Progress(1, 0, None), hangs.append, lambda: next(now_s), compiled_s=compiled_s
    )
    await looking.run()
    assert (len(hangs), bool(threads)) == (1, True)
    assert threading.main_thread() not in threads


# --- starts


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
    looking = StartWatchdog(0.2, 0.5, refused, lambda: next(now_s))
    assert (await looking.run()).startswith("it has taken 0.5")
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
        await watchdog.watched(hang(), Hanging().watchdog())
    assert freed == [True]


async def test_a_start_that_frees_slowly_is_not_cut_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch runs in a thread, and its processes are killed until that ends."""
    monkeypatch.setattr(watchdog, "END_S", 0.001)
    free, freed = asyncio.Event(), asyncio.Event()

    async def hang() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await free.wait()
            freed.set()

    with pytest.raises(EngineFailed):
        await watchdog.watched(hang(), Hanging().watchdog())
    free.set()
    async with asyncio.timeout(5.0):
        await freed.wait()


async def test_a_start_that_is_done_is_returned() -> None:
    """Nobody looks at it any more."""

    async def start() -> str:
        return "run"

    assert await watchdog.watched(start(), StartWatchdog(IDLE_S, LONGEST_S, lambda: NOTHING)) == "run"


async def test_a_start_that_fails_says_why() -> None:
    """The reason is its own."""

    async def fail() -> None:
        raise ValueError("no GPU")

    with pytest.raises(ValueError, match="no GPU"):
        await watchdog.watched(fail(), StartWatchdog(IDLE_S, LONGEST_S, lambda: NOTHING))


async def test_a_cancelled_start_is_cancelled_before_that_is_told() -> None:
    """Its processes are gone when the engine is closed."""
    begun, freed = asyncio.Event(), []

    async def hang() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            freed.append(True)

    task = asyncio.create_task(watchdog.watched(hang(), StartWatchdog(IDLE_S, LONGEST_S, lambda: NOTHING)))
    await begun.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert freed == [True]
