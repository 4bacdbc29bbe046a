"""What nobody stored is forgotten after its time, in which its client could come back."""

from typing import cast

import pytest

from app.journal.retention import MAX_OUTAGE_S, Retention
from app.store.database import Database

DAY_US = 1_790_000_000_000_000


def kept_s(retention: Retention, now_s: float) -> float:
    """Seconds since their end for which answers are kept at that time."""
    return (DAY_US - retention.until_us(now_s, DAY_US)) / 1e6


def test_what_ended_before_the_start_is_kept_for_as_long_as_what_ends_after_it():
    """Nothing goes before the server has served for the whole retention, unless an outage was long."""
    retention = Retention(cast("Database", None), 60.0, lambda: True)
    assert kept_s(retention, 1000.0) == 60 + MAX_OUTAGE_S
    assert kept_s(retention, 1059.0) == 60 + MAX_OUTAGE_S
    assert kept_s(retention, 1060.0) == 60


def test_an_outage_begins_the_time_anew():
    """No client with a key could come back in it."""
    serving = [True]
    retention = Retention(cast("Database", None), 60.0, lambda: serving[0])
    assert kept_s(retention, 1000.0) == 60 + MAX_OUTAGE_S
    assert kept_s(retention, 1100.0) == 60
    serving[0] = False
    assert kept_s(retention, 1105.0) == 60 + MAX_OUTAGE_S
    serving[0] = True
    assert kept_s(retention, 1200.0) == 60 + MAX_OUTAGE_S
    assert kept_s(retention, 1260.0) == 60


@pytest.mark.parametrize("period_s", [0, 50], ids=["never serves", "serves too shortly"])
def test_a_server_that_never_serves_long_enough_forgets_all_the_same(period_s: int):
    """An hour after the retention, by the clock alone."""
    serving = [False]
    retention = Retention(cast("Database", None), 60.0, lambda: serving[0])
    for now_s in range(0, 7200, 25):
        serving[0] = bool(period_s) and now_s % 100 < period_s
        assert kept_s(retention, now_s) == 60 + MAX_OUTAGE_S


def test_without_retention_all_that_ended_is_forgotten_at_once():
    """A retention of 0 is none."""
    assert kept_s(Retention(cast("Database", None), 0.0, lambda: True), 1000.0) == 0
