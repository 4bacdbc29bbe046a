"""When silence is a hang, by a clock that the test moves."""

from __future__ import annotations

import pytest

from app.engine.sglang.watchdog import PATIENCE, HangWatchdog, Progress

HANG_S = 8.0


class Watched:
    """A watchdog over an engine whose progress the test sets."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.seen = Progress(1, 0, "load")
        self.hangs: list[float] = []
        self.watchdog = HangWatchdog(HANG_S, lambda: self.seen, self.hangs.append, lambda: self.now_s)

    def passes(self, seconds: float, step_s: float = 1.0) -> float | None:
        """Look every second; after how many it hung."""
        for number in range(1, int(seconds / step_s) + 1):
            self.now_s += step_s
            if self.watchdog.look():
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
    assert not watched.watchdog.look()
    assert watched.passes(60) == pytest.approx(HANG_S)
