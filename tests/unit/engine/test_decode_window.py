"""The window that keeps the time per output token: what narrows it, and what widens it."""

from __future__ import annotations

import math

from app.engine.decode_window import FIRST_CHOICES, LEAST_PART, LOOK_S, DecodeWindow


class Engine:
    """A step takes 6 ms and 1 ms for each that runs; a second of it at a time."""

    def __init__(self, window: DecodeWindow) -> None:
        self.window = window
        self.now_s = 0.0

    def second(self, running: int) -> float:
        """What the window is after another second with so many running."""
        step_s = 0.006 + 0.001 * running
        self.now_s += LOOK_S
        self.window.made(32, 32 * step_s, running, self.now_s)
        return self.window.most_choices


def wide(target_s: float) -> Engine:
    """An engine whose window is 64."""
    engine = Engine(DecodeWindow(target_s))
    engine.window.most_choices = 64.0
    return engine


def test_without_a_target_there_is_no_end() -> None:
    """However slow the engine is."""
    window = DecodeWindow()
    assert Engine(window).second(running=1000) == math.inf
    assert window.shown == 0.0


def test_it_narrows_to_what_the_target_allows() -> None:
    """20 ms allow 14: of 40 that run at 46 ms, at first no less than so much of them, and then 14."""
    engine = wide(0.02)
    running, seen = 40, []
    for _ in range(40):
        window = engine.second(running)
        seen.append(window)
        running = int(min(window, 40))
    assert seen[0] == 40 * LEAST_PART
    assert set(map(int, seen[10:])) <= {13, 14}


def test_it_begins_narrow_and_doubles() -> None:
    """Until it has been narrowed once."""
    engine = Engine(DecodeWindow(0.02))
    seen, running = [engine.window.most_choices], int(FIRST_CHOICES)
    for _ in range(3):
        seen.append(engine.second(running))
        running = int(seen[-1])
    assert seen[:2] == [FIRST_CHOICES, 2 * FIRST_CHOICES]
    assert seen[2] < seen[1]


def test_it_waits_until_what_runs_has_come_down() -> None:
    """Those that run now were let in before it was narrowed."""
    engine = wide(0.02)
    narrow = engine.second(running=40)
    assert engine.second(running=39) == narrow
    assert engine.second(running=int(narrow)) < narrow


def test_it_widens_only_while_it_is_full() -> None:
    """Once it has been narrowed by one a look; a window that nobody fills says nothing about a wider one."""
    engine = wide(0.02)
    engine.second(running=40)
    engine.window.most_choices = 8.0
    assert engine.second(running=4) == 8.0
    assert [engine.second(running=8), engine.second(running=9)] == [9.0, 10.0]


def test_one_may_always_run() -> None:
    """Though it alone takes longer than the target."""
    engine = Engine(DecodeWindow(0.005))
    assert [engine.second(running=1) for _ in range(3)] == [1.0, 1.0, 1.0]


def test_it_looks_once_a_second() -> None:
    """At all that was made meanwhile, by the token."""
    window = wide(0.02).window
    window.made(1, 0.01, 10, 0.0)
    window.made(99, 99 * 0.01, 10, 0.5)
    window.made(1, 0.5, 10, 0.9)
    assert window.most_choices == 64.0
    window.made(1, 0.01, 10, 1.0)
    assert window.most_choices == 64.0, "15 ms a token over all, of a window that is not full"
    window.made(1, 0.03, 10, 2.0)
    assert window.most_choices == 7.0


def test_a_start_begins_anew() -> None:
    """The engine may be another one now."""
    engine = wide(0.02)
    engine.second(running=40)
    engine.window.reset()
    assert engine.window.most_choices == FIRST_CHOICES
    assert engine.second(running=8) == 2 * FIRST_CHOICES
