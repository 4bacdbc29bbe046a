"""A token bucket: a burst at once, then its rate."""

from app.metering.bucket import Bucket


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
