"""One limit's sliding window: room, debt, and what a wait is worth."""

import math

from app.metering.rates import WINDOW_S, Bucket, Window


def test_a_charge_leaves_after_a_minute() -> None:
    """Not a moment before."""
    window = Window()
    window.charge(100.0, 8)
    window.advance(100.0 + WINDOW_S - 0.001, 10)
    assert window.room(10) == 2
    window.advance(100.0 + WINDOW_S, 10)
    assert window.room(10) == 10


def test_debt_is_charged_when_there_is_room_for_it() -> None:
    """What is owed takes the room of what leaves, as of the moment at which it left."""
    window = Window()
    window.charge(0.0, 10)
    window.add_debt(4)
    window.advance(WINDOW_S + 30.0, 10)
    assert (window.debt, window.used, window.room(10)) == (0, 4, 6)
    window.advance(2 * WINDOW_S, 10)
    assert window.room(10) == 10


def test_what_is_given_back_can_be_charged_again() -> None:
    """A part of a charge that lives; one that has left changes nothing."""
    window = Window()
    charge = window.charge(0.0, 10)
    window.give_back(charge, 3)
    assert window.room(10) == 3
    window.advance(WINDOW_S, 10)
    window.give_back(charge, 3)
    assert window.room(10) == 10


def test_the_wait_is_as_long_as_it_turns_out() -> None:
    """With debt beside: after the named seconds there is room, and just before there is none."""
    window = Window()
    window.charge(0.0, 6)
    window.charge(20.0, 4)
    window.add_debt(3)
    wait_s = window.wait_s(30.0, 5, 10)
    window.advance(30.0 + wait_s - 0.001, 10)
    assert window.room(10) < 5
    window.advance(30.0 + wait_s, 10)
    assert window.room(10) >= 5


def test_more_than_the_limit_never_fits() -> None:
    """The wait is infinite, however empty the window is."""
    assert Window().wait_s(0.0, 11, 10) == math.inf


def test_the_reset_counts_the_rounds_that_debt_takes() -> None:
    """A window's length for each limit's worth of debt, after the last charge has left."""
    window = Window()
    assert window.reset_s(5.0, 10) == 0.0
    window.charge(0.0, 10)
    window.add_debt(11)
    assert window.reset_s(0.0, 10) == WINDOW_S + 2 * WINDOW_S


def test_the_burst_comes_at_once_and_then_the_rate() -> None:
    """Three are taken at once; the fourth waits for its half second."""
    bucket = Bucket(per_s=2.0, burst=3.0, now_s=10.0)
    assert [bucket.take(10.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_a_refused_take_takes_nothing() -> None:
    """After the time that it named, the next one passes."""
    bucket = Bucket(per_s=2.0, burst=1.0, now_s=0.0)
    assert bucket.take(0.0) == 0.0
    wait_s = bucket.take(0.0)
    assert bucket.take(wait_s) == 0.0


def test_a_pause_fills_it_to_the_burst_and_no_further() -> None:
    """An hour of silence is worth one burst."""
    bucket = Bucket(per_s=1.0, burst=2.0, now_s=0.0)
    assert [bucket.take(3600.0) for _ in range(3)] == [0.0, 0.0, 1.0]


def test_a_burst_below_one_still_lets_one_in() -> None:
    """A slow rate is a rate, and not a refusal for ever."""
    assert Bucket(per_s=0.01, burst=0.1, now_s=0.0).take(0.0) == 0.0
