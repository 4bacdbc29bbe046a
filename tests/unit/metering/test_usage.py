"""The usage report: a period's sums, whole and by group, under the names of the API."""

from __future__ import annotations

import sqlite3
from datetime import date

import pytest

from app.core import KeyTerms, Usage
from app.errors import BadRequest
from app.metering import usage as report_module
from app.metering.usage import (
    MAX_NAMES,
    Period,
    groups_of,
    number_of,
    period_of,
    sums_as_json,
    text_of,
    usage_report,
)
from app.store.keys import create
from app.store.ledger import Price
from app.store.usage import UsageSums
from tests.support.ledgers import at, empty_store, settled

TODAY = date(2026, 11, 20)
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


@pytest.mark.parametrize(
    ("name", "first", "last", "period"),
    [
        (None, None, None, Period("2026-11", date(2026, 11, 1), date(2026, 11, 30))),
        ("2024-02", None, None, Period("2024-02", date(2024, 2, 1), date(2024, 2, 29))),
        ("2026-12", None, None, Period("2026-12", date(2026, 12, 1), date(2026, 12, 31))),
        ("2026-11-20", None, None, Period("2026-11-20", TODAY, TODAY)),
        (None, "2026-11-01", "2026-11-20", Period(None, date(2026, 11, 1), TODAY)),
        (None, "2026-11-20", "2026-11-20", Period(None, TODAY, TODAY)),
        (None, "2025-01-01", None, Period(None, date(2025, 1, 1), TODAY)),
    ],
)
def test_a_period_is_its_days(name, first, last, period: Period):
    """A month, a day, and from-to become a first and a last day; nothing at all is this month."""
    assert period_of(name, first, last, TODAY) == period


@pytest.mark.parametrize(
    "name", ["", "2026", "2026-13", "2026-00", "2026-02-30", "20261120", "2026-W01", "x"]
)
def test_a_period_that_is_none_is_refused(name: str):
    """What is no month or day is refused with an example of both."""
    with pytest.raises(BadRequest, match="2026-11 or 2026-11-20") as error:
        period_of(name, None, None, TODAY)
    assert error.value.param == "period"


@pytest.mark.parametrize(
    ("name", "first", "last", "param"),
    [
        ("2026-11", "2026-11-01", None, "period"),
        ("2026-11", None, "2026-11-01", "period"),
        (None, None, "2026-11-01", "from"),
        (None, "2026-11", None, "from"),
        (None, "2026-11-01", "tomorrow", "to"),
        (None, "2026-11-02", "2026-11-01", "to"),
        (None, "2026-11-21", None, "to"),
        (None, "٢٠٢٦-11-01", None, "from"),
    ],
)
def test_days_that_make_no_period_are_refused(name, first, last, param: str):
    """The error is about the parameter that has to change."""
    with pytest.raises(BadRequest) as error:
        period_of(name, first, last, TODAY)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("names", "groups"),
    [
        ("", ()),
        ("day", ("day",)),
        ("model,day", ("model", "day")),
        (" key , model", ("key", "model")),
        ("owner,metadata.project", ("owner", "metadata.project")),
        ("day,day", ("day",)),
    ],
)
def test_groups_are_a_comma_list(names: str, groups: tuple[str, ...]):
    """Names keep their order, and one that comes twice counts once."""
    assert groups_of(names) == groups


@pytest.mark.parametrize(
    "names", ["user", "day,", "Day", "day;model", "metadata.", 'metadata.a"b', "metadata.a\\b", "metadata.\n"]
)
def test_an_unknown_group_is_refused(names: str):
    """The error says which groups there are."""
    with pytest.raises(BadRequest, match=r"day, model, owner, key, metadata\.NAME, not by") as error:
        groups_of(names)
    assert error.value.param == "group_by"


def test_more_names_than_a_report_may_have_are_refused():
    """Each is looked up in every row of the period, and SQLite has no more than 2,000 columns."""
    names = [f"metadata.n{number}" for number in range(MAX_NAMES + 1)]
    assert len(groups_of(",".join(names[:MAX_NAMES]))) == MAX_NAMES
    with pytest.raises(BadRequest, match="at most 8 names") as error:
        groups_of(",".join(names))
    assert error.value.param == "group_by"


def test_days_of_the_store_read_as_dates():
    """A day goes into the store and comes out as it was."""
    assert text_of(number_of(date(2026, 1, 2))) == "2026-01-02"


@pytest.mark.parametrize(("begins", "ends"), [("2026-02-30", None), ("2026-11-01", "2026-13-01")])
def test_day_that_no_calendar_has_is_refused(begins: str, ends: str | None):
    """It looks like one."""
    with pytest.raises(BadRequest, match="is a UTC day"):
        period_of(None, begins, ends, TODAY)
