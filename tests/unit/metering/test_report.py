"""The usage report: a period's sums, whole and by group, under the names of the API."""

from __future__ import annotations

import sqlite3
from datetime import date

import pytest

from app.core import KeyTerms, Usage
from app.errors import BadRequest
from app.metering import report as report_module
from app.metering.period import Period
from app.metering.report import sums_as_json, usage_report
from app.store.keys import create
from app.store.ledger import Price
from app.store.usage import UsageSums
from tests.support.ledgers import at, empty_store, settled

NOVEMBER = Period("2026-11", date(2026, 11, 1), date(2026, 11, 30))
DOLLAR_A_1K = Price(1_000_000, 1_000_000, 1_000_000)


@pytest.fixture
def c() -> sqlite3.Connection:
    """A store with two requests of ann in November, one of bob, and one in October."""
    c = empty_store()
    for owner, day, tokens in (
        ("ann", "2026-11-02", 1),
        ("ann", "2026-11-30", 2),
        ("bob", "2026-11-30", 4),
        ("ann", "2026-10-31", 8),
    ):
        usage = Usage(tokens, 10 * tokens)
        settled(c, usage, owner=owner, created_at_us=at(day), price=DOLLAR_A_1K)
    return c


def test_report_of_a_month_has_its_days_and_everyones_sums(c: sqlite3.Connection):
    """Both ends of the month are in it, the last day of the month before is not."""
    report = usage_report(c, NOVEMBER, ())
    assert (report["from"], report["to"], report["period"]) == ("2026-11-01", "2026-11-30", "2026-11")
    assert (report["requests"], report["input_tokens"], report["output_tokens"]) == (3, 7, 70)
    assert (report["cost_micro_usd"], report["cost_usd"]) == (77_000, 0.077)
    assert report["groups"] == []


def test_report_of_an_owner_has_only_theirs(c: sqlite3.Connection):
    """Whole and by group."""
    report = usage_report(c, NOVEMBER, ("day",), owner="ann")
    assert report["requests"] == 2
    assert [(group["day"], group["input_tokens"]) for group in report["groups"]] == [
        ("2026-11-02", 1),
        ("2026-11-30", 2),
    ]


def test_groups_add_up_to_the_whole(c: sqlite3.Connection):
    """By owner and day; a day is written as people write it."""
    report = usage_report(c, NOVEMBER, ("owner", "day"))
    assert [(group["owner"], group["day"]) for group in report["groups"]] == [
        ("ann", "2026-11-02"),
        ("ann", "2026-11-30"),
        ("bob", "2026-11-30"),
    ]
    assert sum(group["cost_micro_usd"] for group in report["groups"]) == report["cost_micro_usd"]


def test_a_key_is_shown_with_both_its_names_and_its_owner(c: sqlite3.Connection):
    """A key that is not stored has no name: `none` in open mode, `unknown` in older rows."""
    key = create(c, KeyTerms("laptop"), 1, "ann").key
    settled(c, Usage(1, 1), owner="ann", key_id=key.id, created_at_us=at("2026-11-03"))
    report = usage_report(c, NOVEMBER, ("key",), owner="ann")
    assert [(group["key"], group["key_name"], group["owner"]) for group in report["groups"]] == [
        ("none", None, "ann"),
        (key.id, "laptop", "ann"),
    ]
    assert usage_report(c, NOVEMBER, (), key_id=key.id)["requests"] == 1


def test_values_that_callers_choose_make_no_endless_report(
    c: sqlite3.Connection, monkeypatch: pytest.MonkeyPatch
):
    """More groups than the bound are refused, and as many as the bound are shown."""
    monkeypatch.setattr(report_module, "MAX_GROUPS", 3)
    for number in range(2):
        settled(c, Usage(1, 1), metadata={"run": str(number)}, created_at_us=at("2026-11-03"))
    assert len(usage_report(c, NOVEMBER, ("metadata.run",))["groups"]) == 3
    settled(c, Usage(1, 1), metadata={"run": "3"}, created_at_us=at("2026-11-03"))
    with pytest.raises(BadRequest, match="more than 3 groups") as error:
        usage_report(c, NOVEMBER, ("metadata.run",))
    assert error.value.param == "group_by"


def test_dollars_have_all_their_decimals():
    """A micro-dollar is the least that can be spent."""
    assert sums_as_json(UsageSums(cost_micro_usd=1))["cost_usd"] == 0.000001
    assert sums_as_json(UsageSums(cost_micro_usd=12_345_678))["cost_usd"] == 12.345678
