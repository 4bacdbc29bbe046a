"""A JSON object names each of its members once.

JSON parsers disagree on which of two members of one name counts (RFC 8259, section 4): a proxy in front
would check another request than the one that is answered here, where the last counts.
"""

from __future__ import annotations

import json
from typing import Any

from app.errors import BadRequest

_NAMED_UP_TO_BYTES = 1 << 20
"""Greatest body in bytes that is parsed again to name the repeated member in the error."""


def check_unique_names(raw: bytes, body: dict[str, Any]) -> None:
    """Raise BadRequest where the JSON text `raw` has more members than what was parsed of it, `body`."""
    if _num_colons(raw) == _num_members(body):
        return
    name = _first_repeated(raw) if len(raw) <= _NAMED_UP_TO_BYTES else None
    named = "a member" if name is None else f"{name!r}"
    raise BadRequest(
        f"The body has {named} twice in one object; send it once.", code="invalid_json", param=name
    )


def _num_colons(raw: bytes) -> int:
    """Colons of a JSON text that stand outside its strings: one a member."""
    if b"\\" in raw:  # escapes, from the left: what is left of the quotes begins and ends strings
        raw = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(raw.split(b'"')[::2]).count(b":")


def _num_members(body: Any) -> int:
    """Members of all objects in a JSON value, however deep."""
    number, left = 0, [body]
    while left:
        value = left.pop()
        if isinstance(value, dict):
            number += len(value)
            value = value.values()
        for child in value:
            kind = type(child)
            if kind is dict or kind is list:
                left.append(child)
    return number


def _first_repeated(raw: bytes) -> str | None:
    repeated: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                repeated.append(name)
            names.add(name)

    json.loads(raw, object_pairs_hook=look)
    return repeated[0] if repeated else None
