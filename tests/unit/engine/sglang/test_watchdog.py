"""When an engine hangs, by a clock that the test moves."""

from __future__ import annotations

import itertools
import threading

import pytest

from app.engine.sglang.watchdog import BUSY_FACTOR, HangWatchdog, Progress

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
        """Check every second, while compilers take that share of a core; after how many it hung."""
        for number in range(1, int(seconds / step_s) + 1):
            self.now_s += step_s
            self.compiled_s += compilers * step_s
            if self.watchdog.check(self.compiled_s if self.watchdog.is_silent else None):
                return number * step_s
        return None


def test_an_engine_that_says_nothing_while_choices_are_open_hangs() -> None:
    """After the set time from the first check on, and not sooner."""
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
    assert hung_s == pytest.approx(BUSY_FACTOR * HANG_S + 1)


def test_a_process_that_stood_still_itself_reads_before_it_judges() -> None:
    """After a suspended machine, what the engine said meanwhile is still to be read."""
    watched = Watched()
    assert watched.passes(3) is None
    watched.now_s += 3600
    assert not watched.watchdog.check(None)
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
