"""The price table: exact, effective-dated, and refused by name where it is wrong."""

from __future__ import annotations

import tomllib
from datetime import UTC, datetime
from typing import Any

import pytest

from app.metering.pricing import PriceTable, as_usd_per_1k, usd
from app.settings import SettingsError
from app.store.ledger import Price

TOML = """
[[prices]]
model = "llama"
from = "2026-01-01"
input = "0.0005"
cached_input = "0.00005"
output = "0.0015"

[[prices]]
model = "llama"
from = 2026-07-01
input = 0.0004
output = 0.0012

[[prices]]
model = "*"
input = 1
output = "2"
"""
ENTRY = {"model": "llama", "input": "0.1", "output": "0.2"}


def at(day: str) -> int:
    """The first microsecond of a UTC day."""
    return int(datetime.fromisoformat(day).replace(tzinfo=UTC).timestamp()) * 1_000_000


def table(toml: str) -> PriceTable:
    """The price table of a settings file."""
    return PriceTable.parse(tomllib.loads(toml)["prices"])


@pytest.mark.parametrize(
    ("model", "at_us", "price"),
    [
        ("llama", at("2026-01-01"), Price(500, 50, 1500)),
        ("llama", at("2026-07-01") - 1, Price(500, 50, 1500)),
        ("llama", at("2026-07-01"), Price(400, 400, 1200)),
        ("llama", at("2031-01-01"), Price(400, 400, 1200)),
        ("llama", at("2026-01-01") - 1, Price(1_000_000, 1_000_000, 2_000_000)),
        ("other", at("2026-08-01"), Price(1_000_000, 1_000_000, 2_000_000)),
    ],
)
def test_the_price_of_a_day(model: str, at_us: int, price: Price):
    """A model's newest price of the past is in force from UTC midnight; before its first, that of `*`."""
    assert table(TOML).price_of(model, at_us) == price


def test_no_price_is_zero():
    """What no entry prices is free."""
    assert PriceTable.parse(()).price_of("llama", 0) == Price(0, 0, 0)


@pytest.mark.parametrize(
    ("text", "micro_usd"),
    [("0.000001", 1), ("0.1", 100_000), ("0.3", 300_000), ("1e-6", 1), ("0", 0), ("1000", 10**9)],
)
@pytest.mark.parametrize("quote", ['"', ""])
def test_prices_are_read_exactly(text: str, micro_usd: int, quote: str):
    """A price is the decimal that was written, as text or as a number."""
    toml = f'[[prices]]\nmodel = "m"\ninput = {quote}{text}{quote}\noutput = 0'
    assert table(toml).price_of("m", 0) == Price(micro_usd, micro_usd, 0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"input": "0.0000001"}, r"entry 1 \(llama\): input: has at most 6 decimals"),
        ({"output": "-0.1"}, r"entry 1 \(llama\): output: must be from 0"),
        ({"output": 1001}, "output: must be from 0 to 1000"),
        ({"cached_input": "cheap"}, "cached_input: expected USD per 1K tokens"),
        ({"input": True}, "input: expected USD"),
        ({"input": float("nan")}, "input: expected USD"),
        ({"input": "inf"}, "input: expected USD"),
        ({"input": [1]}, "input: expected USD"),
        ({"from": "2026-13-01"}, "from: expected a UTC day"),
        ({"from": 2026}, "from: expected a UTC day"),
        ({"from": datetime(2026, 1, 1, 12, tzinfo=UTC)}, "from: expected a UTC day"),
        (
            {"ouput": "1"},
            r"\(llama\): unknown key 'ouput' \(did you mean 'output'\?\); there are model, from, input",
        ),
        ({"model": ""}, "entry 1.*: model: expected a served model's name"),
        ({"model": 7}, "entry 1.*: model: expected a served model's name"),
    ],
)
def test_a_wrong_entry_is_refused_by_name(change: dict[str, Any], words: str):
    """The error names the entry and says what it should be."""
    with pytest.raises(SettingsError, match=words):
        PriceTable.parse([ENTRY | change])


def test_all_that_is_wrong_is_named_at_once():
    """An operator mends a table in one go: each wrong entry has a line."""
    wrong = [ENTRY | {"input": "free"}, ENTRY, ENTRY | {"model": "b", "output": -1, "frm": "2026-01-01"}]
    with pytest.raises(SettingsError) as refused:
        PriceTable.parse(wrong)
    assert str(refused.value).splitlines() == [
        "3 problems",
        """  [[prices]] entry 1 (llama): input: expected USD per 1K tokens, as "0.0005", got 'free'""",
        "  [[prices]] entry 3 (b): output: must be from 0 to 1000 USD, got -1",
        (
            "  [[prices]] entry 3 (b): unknown key 'frm' (did you mean 'from'?); there are model, from,"
            " input, cached_input, output"
        ),
    ]


@pytest.mark.parametrize("key", ["model", "input", "output"])
def test_an_entry_says_what_is_missing(key: str):
    """A price left out is not taken as free."""
    with pytest.raises(
        SettingsError, match=rf"entry 2( \(llama\))?: {key}: is missing; (give USD|name a served)"
    ):
        PriceTable.parse([ENTRY | {"model": "first"}, {k: v for k, v in ENTRY.items() if k != key}])


def test_two_prices_from_one_day_are_refused():
    """Which of two prices holds is never left to their order."""
    with pytest.raises(SettingsError, match="entry 2: 'llama' has a price from that day already"):
        PriceTable.parse([ENTRY | {"from": "2026-01-01"}, ENTRY | {"from": "2026-01-01"}])


@pytest.mark.parametrize(
    ("micro_usd", "text"), [(0, "0"), (500, "0.0005"), (1, "0.000001"), (2_000_000, "2"), (10**9, "1000")]
)
def test_amounts_are_written_without_an_exponent(micro_usd: int, text: str):
    """Dollars are written plainly, and as short as they are."""
    assert usd(micro_usd) == text


def test_a_price_is_shown_as_it_is_set():
    """A price in force reads as in the settings file."""
    shown = as_usd_per_1k(Price(500, 50, 1500))
    assert shown == {"input": "0.0005", "cached_input": "0.00005", "output": "0.0015"}
