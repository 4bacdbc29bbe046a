"""The prefill window and the decode window: what narrows them, and what widens them."""

from __future__ import annotations

import math

import pytest

from app.admission.windows import DecodeWindow, PrefillWindow
from tests.support.admissions import TUNING


class Engine:
    """A step takes 6 ms and 1 ms for each that runs; as many run as may, of so many that want to."""

    def __init__(self, target_s: float) -> None:
        self.window = DecodeWindow(TUNING, target_s)
        self.window.observe_decode(1, 0.001, 1, 0.0)
        self.now_s = 0.0
        self.running = 0

    def second(self, wanted: int, *, spare: float = 0.0, ends: int = 1000) -> float:
        """What the window is after another second, of whose beginning no more than so many end."""
        self.running = max(self.running - ends, 0)
        while self.running < wanted and self.window.fits(self.running + 1, spare):
            self.running += 1
        if self.running < wanted:
            self.window.mark_full()
        self.now_s += TUNING.decode_look_s
        self.window.observe_decode(32, 32 * (0.006 + 0.001 * self.running), self.running, self.now_s)
        return self.window.max_choices


def wide(target_s: float) -> Engine:
    """An engine whose window is 64."""
    engine = Engine(target_s)
    engine.window.max_choices = 64.0
    return engine


def test_without_a_target_there_is_no_end() -> None:
    """However slow the engine is."""
    engine = Engine(0.0)
    assert engine.second(1000) == math.inf
    assert (engine.running, engine.window.shown) == (1000, 0.0)


def test_it_begins_narrow_and_widens_without_passing_the_target() -> None:
    """8 take 14 of 20 ms: were all of it theirs, 11 would take it."""
    engine = Engine(0.02)
    assert engine.window.max_choices == TUNING.decode_first_choices
    assert [int(engine.second(1000)) for _ in range(4)] == [11, 12, 13, 13]


def test_one_that_is_not_full_doubles_up_to_three_times_what_has_run() -> None:
    """A request of 100 choices waits beside one: no more than 8 are known to be within the target."""
    window = DecodeWindow(TUNING, 0.02)
    seen = []
    for second in range(5):
        assert not window.fits(101)
        window.mark_full()
        window.observe_decode(100, 100 * 0.007, 1, float(second))
        seen.append(window.max_choices)
    assert seen[-1] == 3 * TUNING.decode_first_choices


def test_a_slowdown_is_of_the_least_that_was_measured() -> None:
    """Three times 7 ms allow 15; a slow second, as of a long prompt, does not raise the target."""
    window = DecodeWindow(TUNING, slowdown=3.0)
    for second in range(10):
        window.observe_decode(100, 100 * 0.007, 1, float(second))
    for second in range(10, 20):
        window.mark_full()
        window.observe_decode(100, 100 * 0.022, 8, float(second))
    assert window.max_choices < TUNING.decode_first_choices
    assert DecodeWindow(TUNING, slowdown=0.0).max_choices == math.inf


def test_it_comes_to_what_the_target_allows() -> None:
    """20 ms allow 14, with and without a part that is kept for others."""
    for spare in (0.0, 0.125):
        engine = wide(0.02)
        seen = []
        for _ in range(60):
            engine.second(1000, spare=spare)
            seen.append(engine.running)
        assert seen[0] == 64 * (1 - spare)
        assert set(seen[30:]) <= {12, 13, 14, 15}, spare


def test_one_look_narrows_it_by_no_more_than_a_part() -> None:
    """A long prompt makes one slow second."""
    window = wide(0.02).window
    window.observe_decode(32, 32.0, 40, 1.0)
    assert window.max_choices == 64 * TUNING.decode_decrease


def test_what_one_alone_takes_narrows_nothing() -> None:
    """Fewer would not be faster."""
    engine = wide(0.005)
    assert engine.second(1) == 64.0


def test_it_waits_until_what_runs_has_come_down() -> None:
    """Those that run now were let in before it was narrowed."""
    engine = wide(0.02)
    seen = [engine.second(1000, ends=0) for _ in range(9)]
    assert min(seen) >= 64 / TUNING.decode_overrun * TUNING.decode_decrease
    assert engine.running == 64
    assert engine.second(1000, ends=20) < seen[-1]


def test_it_widens_only_while_it_holds_back() -> None:
    """By one a look once it has been narrowed; a window that nobody fills says nothing about a wider one."""
    engine = wide(0.02)
    engine.second(1000)
    engine.window.max_choices = 8.0
    assert engine.second(4) == 8.0
    assert [engine.second(1000), engine.second(1000)] == [9.0, 10.0]


def test_it_widens_for_requests_of_several_choices() -> None:
    """Five a request: one runs and a second waits, though three places are free."""
    engine = Engine(0.02)
    assert not engine.window.fits(10)
    engine.window.mark_full()
    engine.window.observe_decode(32, 32 * 0.011, 5, 1.0)
    assert engine.window.fits(10)


def test_it_looks_once_a_second() -> None:
    """At all that was made meanwhile, by the token, the first time after a second too."""
    window = DecodeWindow(TUNING, 0.02)
    window.max_choices = 64.0
    window.observe_decode(1, 0.5, 10, 5.0)
    window.observe_decode(99, 99 * 0.01, 10, 5.5)
    assert window.max_choices == 64.0
    window.observe_decode(1, 0.01, 10, 6.0)
    assert window.max_choices == 64.0, "15 ms a token over all"
    window.observe_decode(1, 0.03, 10, 7.0)
    assert window.max_choices == 64 * TUNING.decode_decrease


def test_a_start_begins_anew() -> None:
    """The engine may be another one now."""
    engine = wide(0.02)
    engine.second(1000)
    engine.window.reset()
    engine.running = 0
    assert engine.window.max_choices == TUNING.decode_first_choices
    engine.second(1000)
    assert int(engine.second(1000)) == 11


def test_the_window_opens_while_first_tokens_come_in_time() -> None:
    """It doubles with each window of them, and narrows once for those that come late."""
    prefill_window = PrefillWindow(1.0, 100_000, TUNING)
    for _ in range(2):
        let_in = []
        while prefill_window.fits(512):
            let_in.append(prefill_window.enter(512, 0.0))
        prefill_window.mark_full()
        for queued_behind in let_in:
            prefill_window.started(512, 0.0, 0.5, queued_behind=queued_behind)
    assert prefill_window.window_tokens == 4 * TUNING.prefill_step_tokens
    slow = [prefill_window.enter(512, 1.0) for _ in range(8)]
    for queued_behind in slow:
        prefill_window.started(512, 1.0, 5.0, queued_behind=queued_behind)
    assert prefill_window.window_tokens == pytest.approx(0.7 * 4 * TUNING.prefill_step_tokens)
    prefill_window.reset()
    assert prefill_window.window_tokens == TUNING.prefill_step_tokens


def test_the_pace_of_prefill_is_that_of_bursts() -> None:
    """Whatever lies before and between them: 2,048 tokens in half a second, after a day and after an hour."""
    prefill_window = PrefillWindow(2.0, 16_384, TUNING)
    assert prefill_window.queueable_tokens(0.0) == 8192
    for burst_s in (86_400.0, 90_000.0):
        for now_s in (burst_s + number / 2 for number in range(20)):
            let_in = []
            while prefill_window.fits(512):
                let_in.append(prefill_window.enter(512, now_s))
            prefill_window.mark_full()
            for queued_behind in let_in:
                prefill_window.started(512, now_s, now_s + 0.5, queued_behind=queued_behind)
            prefill_window.reset()
        assert prefill_window.queueable_tokens(0.0) == pytest.approx(4096, rel=0.25)


def test_a_long_prompt_goes_alone() -> None:
    """One that is larger than the window is let in when nothing is before it."""
    prefill_window = PrefillWindow(1.0, 4096, TUNING)
    assert prefill_window.fits(50_000)
    prefill_window.enter(50_000, 0.0)
    assert not prefill_window.fits(1)
    prefill_window.leave(50_000)
    assert prefill_window.fits(1)
