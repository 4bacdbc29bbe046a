"""The errors in the tables of a TOML file: each entry by its place, with what is allowed there.

pydantic does the checking. It takes 60 ms to import, so only the schemas import it, and they are imported
where there is a file to check.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic_core import ErrorDetails

Location = tuple[int | str, ...]
"""The place of an entry: keys, and indices from 0 within a list."""

_LISTED = 20
"""Problems listed in full: a file of another kind has one in each line."""
_EXPECTED = {
    "dict_type": "expected a table",
    "float_type": "expected a number",
    "list_type": "expected a list",
    "model_type": "expected a table",
}
_WHOLE = ("dict_type", "list_type", "model_type")
_KINDS: Mapping[type, str] = {dict: "a table", list: "a list", str: "a text"}


def problems(
    error: ValidationError,
    table_at: Callable[[Location], type[BaseModel]],
    *,
    name: Callable[[Location], str] | None = None,
    words: Mapping[str, str] | None = None,
) -> list[str]:
    """Each error as `place: what is wrong`.

    `table_at` gives the model of the table at a location, `name` the words for a location (default: keys with
    dots between them), and `words` what is expected, by pydantic's type of error.
    """
    expected = _EXPECTED | dict(words or {})
    listed = []
    for detail in error.errors(include_url=False):
        location = tuple(step for step in detail["loc"] if step != "[key]")
        if detail["type"] == "extra_forbidden":
            location, unknown = location[:-1], str(location[-1])
            text = _unknown_key(unknown, table_at(location))
        else:
            text = _worded(detail, location, table_at, expected)
        place = (name or _dotted)(location)
        listed.append(f"{place}: {text}")
    return listed


def together(listed: Sequence[str]) -> str:
    """Problems as one message: the only one as it is, several a line each."""
    if len(listed) == 1:
        return listed[0]
    lines = [f"{len(listed)} problems", *listed[:_LISTED]]
    if len(listed) > _LISTED:
        lines.append(f"and {len(listed) - _LISTED} more")
    return "\n  ".join(lines)


def _dotted(location: Location) -> str:
    keys = [f"entry {step + 1}" if isinstance(step, int) else step for step in location]
    return ".".join(keys) or "top level"


def _unknown_key(key: str, table: type[BaseModel]) -> str:
    allowed = [field.alias or name for name, field in table.model_fields.items()]
    near = difflib.get_close_matches(key, allowed, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"unknown key {reprlib.repr(key)}{hint}; there are {', '.join(allowed)}"


def _worded(
    detail: ErrorDetails,
    location: Location,
    table_at: Callable[[Location], type[BaseModel]],
    expected: Mapping[str, str],
) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind == "value_error":  # raised by a validator of ours, which knows what to say of the value
        return str(context["error"])
    if kind == "missing":
        field = table_at(location[:-1]).model_fields[str(location[-1])]
        return f"is missing; {field.description}"
    if kind == "literal_error":
        wanted = f"expected {context['expected']}"
    else:
        wanted = expected.get(kind, detail["msg"])
    # What is of the wrong kind as a whole may hold anything, such as texts that belong in no log.
    value = _KINDS.get(type(detail["input"])) if kind in _WHOLE else None
    return f"{wanted}, got {value or reprlib.repr(detail['input'])}"
