"""What nobody stored is forgotten after its time, in which its client could come back."""

from app.generation.retention import Retention

DAY_US = 1_790_000_000_000_000


def test_nothing_is_forgotten_before_the_server_has_served_for_that_long():
    """What ended before the start is kept for as long as what ends after it."""
    retention = Retention(60.0, lambda: True)
    assert retention.until_us(1000.0, DAY_US) is None
    assert retention.until_us(1059.0, DAY_US) is None
    assert retention.until_us(1060.0, DAY_US) == DAY_US - 60_000_000


def test_an_outage_begins_the_time_anew():
    """No client with a key could come back in it."""
    serving = [True]
    retention = Retention(60.0, lambda: serving[0])
    assert retention.until_us(1000.0, DAY_US) is None
    assert retention.until_us(1100.0, DAY_US) is not None
    serving[0] = False
    assert retention.until_us(1105.0, DAY_US) is None
    serving[0] = True
    assert retention.until_us(1200.0, DAY_US) is None
    assert retention.until_us(1260.0, DAY_US) is not None


def test_without_retention_all_that_ended_is_forgotten_at_once():
    """A retention of 0 is none."""
    assert Retention(0.0, lambda: True).until_us(1000.0, DAY_US) == DAY_US
