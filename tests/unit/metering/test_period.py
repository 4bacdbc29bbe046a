"""Periods: a month, a day, or from a day to a day, all in UTC."""

from __future__ import annotations

from datetime import date

import pytest

from app.errors import BadRequest
from app.metering.period import MAX_NAMES, Period, groups_of, number_of, period_of, text_of

TODAY = date(2026, 11, 20)


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
