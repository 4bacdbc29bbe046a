"""The entries of `[[prices]]`: what each may have, checked together. Amounts are decimals, never floats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

from app.settings import SettingsError
from app.toml_tables import Location, problems, together

MAX_USD_PER_1K = 1000
"""Keeps the sum of any store's rows within SQLite's 64 bits."""
_DECIMALS = 6

_USD = 'expected USD per 1K tokens, as "0.0005"'
_RANGE = f"must be from 0 to {MAX_USD_PER_1K} USD"
_WORDS = {
    "decimal_type": _USD,
    "decimal_parsing": _USD,
    "finite_number": _USD,
    "greater_than_equal": _RANGE,
    "less_than_equal": _RANGE,
    "decimal_max_places": f"has at most {_DECIMALS} decimals (a micro-dollar per 1K tokens)",
}


def _model(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f'expected a served model\'s name, or "*" for any; got {value!r}')
    return value


def _day(value: object) -> date:
    """A day; neither a time of day nor pydantic's count of seconds."""
    try:
        if isinstance(value, str):
            return date.fromisoformat(value)
    except ValueError:
        pass
    if isinstance(value, date) and not isinstance(value, datetime):
        return value
    raise ValueError(f'expected a UTC day, as "2026-01-01", got {value!r}')


_Usd = Annotated[
    Decimal, Field(ge=0, le=MAX_USD_PER_1K, decimal_places=_DECIMALS, allow_inf_nan=False, strict=False)
]


class PriceEntry(BaseModel):
    """One entry: USD per 1K tokens of a model, from a UTC day on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: Annotated[str, BeforeValidator(_model)] = Field(description='name a served model, or "*" for any')
    from_day: Annotated[date | None, BeforeValidator(_day)] = Field(default=None, alias="from")
    input: _Usd = Field(description="give USD per 1K prompt tokens; 0 if they are free")
    cached_input: _Usd | None = None
    output: _Usd = Field(description="give USD per 1K generated tokens; 0 if they are free")


_ENTRIES = TypeAdapter(list[PriceEntry])


def read(entries: Sequence[Mapping[str, Any]]) -> list[PriceEntry]:
    """The entries, checked. Raises SettingsError naming every wrong one."""

    def name(location: Location) -> str:
        number, *keys = location
        model = entries[int(number)].get("model")
        label = f" ({model})" if isinstance(model, str) and model else ""
        return ": ".join([entry_label(int(number)) + label, *(f"{key}" for key in keys)])

    try:
        return _ENTRIES.validate_python(entries)
    except ValidationError as exc:
        listed = problems(exc, lambda _location: PriceEntry, name=name, words=_WORDS)
        raise SettingsError(together(listed)) from None


def entry_label(index: int) -> str:
    """The name of an entry in errors; the first has index 0."""
    return f"[[prices]] entry {index + 1}"
