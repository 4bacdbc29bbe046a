"""The fields of a request: one declaration says what a value may hold, and checks it.

The OpenAPI document and the tables of docs/parameters.md are made of the same declarations
(scripts/api_document). Null is absent, in every object of a request.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from app.errors import BadRequest, unknown_parameter

QUOTED_CHARS = 64
_NAME_CHARS = 100
_KIND_NAMES: Mapping[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "an array",
    dict: "an object",
}


@dataclass(frozen=True, slots=True)
class Field:
    """The kinds of a JSON value, and the bounds of each kind."""

    kinds: tuple[type, ...]
    minimum: float | None = None
    maximum: float | None = None
    min_chars: int = 0
    max_chars: float = math.inf
    choices: tuple[str, ...] = ()
    """The only strings that it may be."""
    min_entries: int = 0
    max_entries: float = math.inf
    """Entries of an array or object."""
    items: Field | None = None
    """Each entry of an array, or each value of an object."""
    fields: Mapping[str, Field] | None = None
    """The fields of an object, by name; any other name is refused."""
    required: tuple[str, ...] = ()
    """Those of `fields` that must be there."""
    dropped: bool = False
    """Taken, whatever it holds, and left out of what is read."""


ANY = Field((str, int, float, bool, list, dict))
TEXT = Field((str,))
BOOL = Field((bool,))
ARRAY = Field((list,))
OBJECT = Field((dict,))


def dropped(names: Iterable[str]) -> dict[str, Field]:
    """Fields of these names that are taken and dropped."""
    return dict.fromkeys(sorted(names), Field((), dropped=True))


def read(value: Any, where: str, field: Field) -> Any:
    """The value as `field` declares it: in its objects no nulls, and nothing that is dropped.

    Raises BadRequest, and UnsupportedParameter for an unknown name, naming the place in `where`.
    """
    kind = type(value)
    if kind not in field.kinds:
        check_kind(where, value, *field.kinds)
    if kind is str:
        if not field.min_chars <= len(value) <= field.max_chars:
            check_size(where, len(value), field.min_chars, field.max_chars, "characters")
        if field.choices and value not in field.choices:
            raise not_among(where, value, field.choices)
    elif kind is dict or kind is list:
        if not field.min_entries <= len(value) <= field.max_entries:
            check_size(where, len(value), field.min_entries, field.max_entries, "entries")
        if field.fields is not None and kind is dict:
            return read_fields(value, where, field.fields, field.required)
        if field.items is not None:
            return _read_items(value, where, field.items)
    elif kind is not bool:
        _check_range(where, value, field)
    return value


def _read_items(value: list[Any] | dict[str, Any], where: str, items: Field) -> Any:
    if isinstance(value, list):
        return [read(entry, f"{where}[{i}]", items) for i, entry in enumerate(value)]
    return {name: read(entry, f"{where}.{name[:QUOTED_CHARS]}", items) for name, entry in value.items()}


def read_fields(
    source: Mapping[str, Any], where: str, fields: Mapping[str, Field], required: Iterable[str] = ()
) -> dict[str, Any]:
    """The fields of an object, `where` being empty for a whole body. Raises as `read`."""
    prefix = where and f"{where}."
    sent = {}
    for name, value in source.items():
        if value is None:
            continue
        field = fields.get(name)
        if field is None:
            raise unknown_parameter(prefix + name[:_NAME_CHARS])
        if not field.dropped:
            sent[name] = read(value, prefix + name, field)
    for name in required:
        if name not in sent:
            raise missing(prefix + name)
    return sent


def check_kind(where: str, value: Any, *kinds: type) -> None:
    """Raise BadRequest, naming `where`, unless the JSON value is of one of `kinds`."""
    # bool is an int in Python, not in JSON.
    if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
        expected = " or ".join(kind_names(kinds))
        got = "null" if value is None else _KIND_NAMES.get(type(value), type(value).__name__)
        raise BadRequest(f"{where} must be {expected}, got {got}.", code="invalid_type", param=where)


def check_size(where: str, size: int, least: int, limit: float, unit: str = "") -> None:
    """Raise BadRequest, naming `where`, unless there are `least` to `limit` of a unit."""
    if least <= size <= limit:
        return
    if limit == math.inf:
        raise BadRequest(f"{where} must not be empty.", param=where)
    bounds = f"{least} to {limit:,}" if least else f"at most {limit:,}"
    raise BadRequest(f"{where} takes {bounds} {unit}, got {size:,}.", param=where)


def _check_range(where: str, value: float, field: Field) -> None:
    if field.minimum is not None and not value >= field.minimum:  # NaN is neither
        raise BadRequest(f"{where} must be at least {plain(field.minimum)}, got {value}.", param=where)
    if field.maximum is not None and not value <= field.maximum:
        raise BadRequest(f"{where} must be at most {plain(field.maximum)}, got {value}.", param=where)


def missing(where: str) -> BadRequest:
    """The error for a field that must be there."""
    return BadRequest(f"{where} is required.", code="missing_parameter", param=where)


def not_among(where: str, value: Any, choices: Iterable[str], code: str | None = None) -> BadRequest:
    """The error for a value that is none of `choices`."""
    message = f"{where} must be one of {', '.join(choices)}, got {shown(value)}."
    return BadRequest(message, code=code, param=where)


def quoted(text: str) -> str:
    """A caller's text as an error quotes it: the beginning, however long it is."""
    return repr(text if len(text) <= QUOTED_CHARS else text[:QUOTED_CHARS] + "…")


def shown(value: Any) -> str:
    """A string as a refusal quotes it; anything else is not written out, as it may be millions of values."""
    return quoted(value) if isinstance(value, str) else "no string"


def plain(number: float) -> str:
    """A bound as people write it; 64-bit ones as powers."""
    named = {2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}
    return named.get(int(number)) or f"{number:,}"


def kind_names(kinds: Iterable[type]) -> list[str]:
    """The kinds as a caller knows them; an integer is a number."""
    return list(dict.fromkeys(_KIND_NAMES[k] for k in kinds if k is not int or float not in kinds))
