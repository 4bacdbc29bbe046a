"""The UTC days of a question about usage."""

from __future__ import annotations

import calendar
import re
from collections.abc import Sequence
from datetime import date
from typing import NamedTuple

from app.errors import BadRequest
from app.store.usage import GROUPS, METADATA

_MONTH = re.compile(r"\d{4}-\d{2}", re.ASCII)
_DAY = re.compile(r"\d{4}-\d{2}-\d{2}", re.ASCII)
_METADATA = re.compile(re.escape(METADATA) + r"[^\x00-\x1f\x7f\"\\]{1,64}")
"""The names that SQLite's JSON paths can have in quotes."""

MAX_NAMES = 8
"""Names that usage is grouped by at once; each of the metadata is looked up in every row."""


class Period(NamedTuple):
    """Two days and those between; the name of the month or day that they are, if it was asked for."""

    name: str | None
    first: date
    last: date


def period_of(name: str | None, first: str | None, last: str | None, today: date) -> Period:
    """The days of a month, of a day, or of `from` to `to`; without any of them the month of `today`.

    `from` alone ends today. Raises BadRequest naming the parameter.
    """
    if first is None and last is None:
        return _named(f"{today:%Y-%m}" if name is None else name)
    if name is not None:
        raise BadRequest("Give either `period`, or `from` and `to`.", param="period")
    if first is None:
        raise BadRequest("`to` needs a `from`.", code="missing_parameter", param="from")
    begins = _day(first, "from")
    ends = today if last is None else _day(last, "to")
    if ends < begins:
        raise BadRequest(f"The period ends ({ends}) before it begins ({begins}).", param="to")
    return Period(None, begins, ends)


def groups_of(names: str) -> Sequence[str]:
    """The names of a comma list, as `day,metadata.project`. Raises BadRequest."""
    chosen = tuple(dict.fromkeys(name.strip() for name in names.split(","))) if names.strip() else ()
    if len(chosen) > MAX_NAMES:
        raise BadRequest(f"Usage is grouped by at most {MAX_NAMES} names at once.", param="group_by")
    for name in chosen:
        if name not in GROUPS and not _METADATA.fullmatch(name):
            groups = ", ".join([*GROUPS, f"{METADATA}NAME"])
            raise BadRequest(f"Usage is grouped by {groups}, not by {name!r}.", param="group_by")
    return chosen


def number_of(day: date) -> int:
    """A day as the store has it: 20261121."""
    return day.year * 10_000 + day.month * 100 + day.day


def text_of(day: int) -> str:
    """A day of the store as "2026-11-21"."""
    return f"{day // 10_000:04}-{day // 100 % 100:02}-{day % 100:02}"


def _named(name: str) -> Period:
    try:
        if _DAY.fullmatch(name):
            day = date.fromisoformat(name)
            return Period(name, day, day)
        if _MONTH.fullmatch(name):
            first = date.fromisoformat(f"{name}-01")
            last = calendar.monthrange(first.year, first.month)[1]
            return Period(name, first, first.replace(day=last))
    except ValueError:
        pass
    raise BadRequest(
        f"`period` is a UTC month or day, as 2026-11 or 2026-11-20; got {name!r}.", param="period"
    )


def _day(text: str, param: str) -> date:
    try:
        if _DAY.fullmatch(text):
            return date.fromisoformat(text)
    except ValueError:
        pass
    raise BadRequest(f"`{param}` is a UTC day, as 2026-11-20; got {text!r}.", param=param)
