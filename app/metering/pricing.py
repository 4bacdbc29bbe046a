"""Prices by model and day, read from `[[prices]]` of the settings file; exact, never floating point.

A request is billed at the price in force on the UTC day on which it was reserved, and that
price is stored with it: a later change of the table changes no bill.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal, InvalidOperation
from typing import Any

from app.settings import SettingsError, unknown
from app.store.ledger import Price, day_of

ANY_MODEL = "*"
MAX_USD_PER_1K = 1000
"""Keeps the sum of any store's rows within SQLite's 64 bits."""
_MICRO = 1_000_000
_KEYS = ("model", "from", "input", "cached_input", "output")


class PriceTable:
    """The price of each model from a day on; a model without one costs nothing."""

    def __init__(self, entries: Mapping[tuple[str, int], Price]) -> None:
        self._by_model: dict[str, list[tuple[int, Price]]] = {}
        for (model, from_day), price in sorted(entries.items()):
            self._by_model.setdefault(model, []).append((from_day, price))

    @classmethod
    def parse(cls, prices: Iterable[Mapping[str, Any]]) -> PriceTable:
        """The table that the settings have. Raises SettingsError naming the entry."""
        entries: dict[tuple[str, int], Price] = {}
        for number, raw in enumerate(prices, start=1):
            key, price = _entry(raw, f"[[prices]] entry {number}")
            if key in entries:
                raise SettingsError(
                    f"[[prices]] entry {number}: {key[0]!r} has a price from that day already;"
                    " remove one, or give one another `from`"
                )
            entries[key] = price
        return cls(entries)

    def price_of(self, model: str, at_us: int) -> Price:
        """The price in force at a time: the model's own newest one, else that of `*`, else zero."""
        day = day_of(at_us)
        for name in (model, ANY_MODEL):
            dated = self._by_model.get(name, [])
            after = bisect.bisect(dated, day, key=lambda entry: entry[0])
            if after:
                return dated[after - 1][1]
        return Price()


def usd(micro_usd: int) -> str:
    """An amount in dollars, exact and without trailing zeros."""
    return f"{Decimal(micro_usd).scaleb(-6).normalize():f}"


def as_usd_per_1k(price: Price) -> dict[str, str]:
    """A price as the settings write it."""
    return {
        "input": usd(price.input_micro_usd_per_1k),
        "cached_input": usd(price.cached_micro_usd_per_1k),
        "output": usd(price.output_micro_usd_per_1k),
    }


def _entry(raw: Mapping[str, Any], where: str) -> tuple[tuple[str, int], Price]:
    for key in raw:
        if key not in _KEYS:
            raise unknown(key, _KEYS, where)
    for key in ("model", "input", "output"):
        if key not in raw:
            raise SettingsError(f"{where}: `{key}` is missing; {_MISSING[key]}")
    model = raw["model"]
    if not isinstance(model, str) or not model:
        raise SettingsError(f'{where}: `model` is a served model\'s name, or "*" for any; got {model!r}')
    where += f" ({model})"
    price = Price(
        _micro_usd(raw["input"], f"{where}: input"),
        _micro_usd(raw.get("cached_input", raw["input"]), f"{where}: cached_input"),
        _micro_usd(raw["output"], f"{where}: output"),
    )
    return (model, _from_day(raw.get("from"), f"{where}: from")), price


_MISSING = {
    "model": 'name a served model, or "*" for any',
    "input": "give USD per 1K prompt tokens; 0 if they are free",
    "output": "give USD per 1K generated tokens; 0 if they are free",
}


def _micro_usd(raw: object, where: str) -> int:
    """USD as micro-dollars, exactly."""
    try:
        # A float's own text is the shortest that reads back the same: what the file has.
        amount = Decimal(str(raw)) if isinstance(raw, str | int | float) else None
    except InvalidOperation:
        amount = None
    if amount is None or isinstance(raw, bool) or not amount.is_finite():
        raise SettingsError(f'{where}: expected USD per 1K tokens, as "0.0005", got {raw!r}')
    if not 0 <= amount <= MAX_USD_PER_1K:
        raise SettingsError(f"{where}: must be from 0 to {MAX_USD_PER_1K} USD, got {raw!r}")
    micro = amount * _MICRO
    if micro != micro.to_integral_value():
        raise SettingsError(f"{where}: has at most 6 decimals (a micro-dollar per 1K tokens), got {raw!r}")
    return int(micro)


def _from_day(raw: object, where: str) -> int:
    """A day as 20260101; 0, before all others, when there is none."""
    if raw is None:
        return 0
    try:
        day = raw if isinstance(raw, date) and not isinstance(raw, datetime) else date.fromisoformat(raw)  # type: ignore[arg-type]  # TypeError says so
    except (TypeError, ValueError):
        raise SettingsError(f'{where}: expected a UTC day, as "2026-01-01", got {raw!r}') from None
    return day.year * 10_000 + day.month * 100 + day.day
