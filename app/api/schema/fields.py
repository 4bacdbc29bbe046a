"""The fields of an object within a request: checked by name, null is absent."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from app.api.schema.parameters import check_kind, quoted
from app.errors import BadRequest, unknown_parameter

_PLACE_CHARS = 100


def fields_of(source: Any, where: str, names: Collection[str]) -> dict[str, Any]:
    """The fields of an object that are not null.

    Raises BadRequest, naming `where`, for what is no object, and UnsupportedParameter, naming the field,
    for a name that is none of `names`.
    """
    check_kind(where, source, dict)
    sent = {name: value for name, value in source.items() if value is not None}
    for name in sent:
        if name not in names:
            raise unknown_parameter(f"{where}.{name[:_PLACE_CHARS]}")
    return sent


def required(sent: Mapping[str, Any], name: str, where: str, *kinds: type) -> Any:
    """The field of that name. Raises BadRequest where it is absent, or of none of `kinds`."""
    place = f"{where}.{name}"
    if sent.get(name) is None:
        raise BadRequest(f"{place} is required.", code="missing_parameter", param=place)
    check_kind(place, sent[name], *kinds)
    return sent[name]


def optional(sent: Mapping[str, Any], name: str, where: str, *kinds: type) -> dict[str, Any]:
    """The field of that name alone; nothing where it is absent. Raises BadRequest for another kind."""
    if sent.get(name) is None:
        return {}
    check_kind(f"{where}.{name}", sent[name], *kinds)
    return {name: sent[name]}


def bounded_text(value: Any, where: str, max_chars: int) -> str:
    """A string of at most so many characters. Raises BadRequest naming `where`."""
    check_kind(where, value, str)
    if len(value) > max_chars:
        raise BadRequest(f"{where} must have at most {max_chars} characters, got {len(value)}.", param=where)
    text: str = value
    return text


def shown(value: Any) -> str:
    """A string as a refusal quotes it; anything else is not written out, as it may be millions of values."""
    return quoted(value) if isinstance(value, str) else "no string"
