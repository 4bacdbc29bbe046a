"""Prices by model and day, read from `[[prices]]` of the settings file; exact, never floating point.

A request is billed at the price in force on the UTC day on which it was reserved, and that
price is stored with it: a later change of the table changes no bill.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from app.settings import SettingsError
from app.store.ledger import Price, day_of
from app.toml_tables import together

if TYPE_CHECKING:
    from app.metering.price_schema import PriceEntry

ANY_MODEL = "*"
_MICRO = 1_000_000


class PriceTable:
    """The price of each model from a day on; a model without one costs nothing."""

    def __init__(self, entries: Mapping[tuple[str, int], Price]) -> None:
        self._by_model: dict[str, list[tuple[int, Price]]] = {}
        for (model, from_day), price in sorted(entries.items()):
            self._by_model.setdefault(model, []).append((from_day, price))

    @classmethod
    def parse(cls, prices: Sequence[Mapping[str, Any]]) -> PriceTable:
        """The table that the settings have. Raises SettingsError naming every wrong entry."""
        if not prices:
            return cls({})
        from app.metering import price_schema  # with pydantic: only where there are prices

        entries: dict[tuple[str, int], Price] = {}
        repeated = []
        for index, checked in enumerate(price_schema.read(prices)):
            key, price = _entry(checked)
            if key in entries:
                repeated.append(
                    f"{price_schema.entry_label(index)}: {key[0]!r} has a price from that day already;"
                    " remove one, or give one another `from`"
                )
            entries[key] = price
        if repeated:
            raise SettingsError(together(repeated))
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


def _entry(entry: PriceEntry) -> tuple[tuple[str, int], Price]:
    cached = entry.input if entry.cached_input is None else entry.cached_input
    price = Price(_micro_usd(entry.input), _micro_usd(cached), _micro_usd(entry.output))
    day = entry.from_day
    from_day = 0 if day is None else day.year * 10_000 + day.month * 100 + day.day
    return (entry.model, from_day), price


def _micro_usd(amount: Decimal) -> int:
    return int(amount * _MICRO)
