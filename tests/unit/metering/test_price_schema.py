"""The entries of `[[prices]]`: exact amounts, and every wrong one named."""

from __future__ import annotations

from datetime import date, datetime
from decimal import Decimal
from typing import Any

import pytest

from app.metering.price_schema import MAX_USD_PER_1K, read
from app.settings import SettingsError

ENTRY = {"model": "llama", "input": "0.5", "output": "1.5"}


def wrong(**fields: Any) -> str:
    """What is said of the second of two entries, with these fields changed."""
    with pytest.raises(SettingsError) as refused:
        read([ENTRY, ENTRY | fields])
    return str(refused.value)


def test_amounts_are_exact():
    """What a float would round is kept to the last digit."""
    (entry,) = read([ENTRY | {"input": "0.000001", "output": 1000, "cached_input": 0}])
    assert (entry.input, entry.output, entry.cached_input) == (Decimal("0.000001"), 1000, 0)


@pytest.mark.parametrize("day", ["2026-01-31", date(2026, 1, 31)])
def test_day_is_written_as_text_or_as_tomls_own(day: object):
    """Both mean the same."""
    (entry,) = read([ENTRY | {"from": day}])
    assert entry.from_day == date(2026, 1, 31)


@pytest.mark.parametrize("day", ["31.01.2026", "2026-02-30", 20260131, datetime(2026, 1, 31), True])  # noqa: DTZ001
def test_anything_else_is_no_day(day: object):
    """Neither a time of day nor a count of seconds."""
    assert "[[prices]] entry 2 (llama): from: expected a UTC day" in wrong(**{"from": day})


@pytest.mark.parametrize(
    ("amount", "why"),
    [
        ("-0.1", f"must be from 0 to {MAX_USD_PER_1K} USD"),
        (f"{MAX_USD_PER_1K}.1", f"must be from 0 to {MAX_USD_PER_1K} USD"),
        ("0.0000001", "at most 6 decimals"),
        ("a lot", "expected USD per 1K tokens"),
        ("NaN", "expected USD per 1K tokens"),
        (None, "expected USD per 1K tokens"),
    ],
)
def test_amount_that_nobody_could_be_billed_is_refused(amount: object, why: str):
    """In words of the settings, with the entry and the key."""
    text = wrong(output=amount)
    assert "[[prices]] entry 2 (llama): output" in text
    assert why in text


def test_highest_price_is_allowed():
    """The bound itself."""
    (entry,) = read([ENTRY | {"input": MAX_USD_PER_1K}])
    assert entry.input == MAX_USD_PER_1K


@pytest.mark.parametrize("model", ["", 7, None])
def test_model_without_a_name_is_refused(model: object):
    """There is the star for any."""
    assert "expected a served model's name" in wrong(model=model)


def test_every_wrong_entry_is_named_at_once():
    """Unknown keys and missing ones too."""
    with pytest.raises(SettingsError) as refused:
        read([{"model": "a", "input": "1"}, {"model": "b", "input": "1", "output": "1", "inptu": 2}])
    text = str(refused.value)
    assert "[[prices]] entry 1 (a): output" in text
    assert "[[prices]] entry 2 (b): inptu" in text or "unknown key 'inptu'" in text
