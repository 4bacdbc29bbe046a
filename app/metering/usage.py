"""Usage by UTC days: what may be asked for, and the report, the same over HTTP and on the command line."""

from __future__ import annotations

import calendar
import re
import sqlite3
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, NamedTuple

from app.errors import BadRequest
from app.store.keys import names_of
from app.store.usage import GROUPS, METADATA, Group, UsageSums, usage

MAX_GROUPS = 10_000
"""Groups of a report by metadata, whose values the callers choose."""
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


def usage_report(
    c: sqlite3.Connection,
    period: Period,
    group_by: Sequence[str],
    *,
    owner: str | None = None,
    key_id: str | None = None,
) -> dict[str, Any]:
    """The answer of `GET /api/usage`, from one snapshot; `owner` and `key_id` None mean everyone's.

    Raises BadRequest for more groups than `MAX_GROUPS` by metadata.
    """
    days = number_of(period.first), number_of(period.last)
    [whole] = usage(c, *days, (), owner=owner, key_id=key_id)
    groups: Sequence[Group] = ()
    if group_by:
        limit = MAX_GROUPS + 1 if any(name.startswith(METADATA) for name in group_by) else -1
        groups = usage(c, *days, group_by, owner=owner, key_id=key_id, limit=limit)
        if 0 <= MAX_GROUPS < limit == len(groups):
            raise BadRequest(
                f"There are more than {MAX_GROUPS:,} groups; ask for a shorter period.", param="group_by"
            )
    names = names_of(c) if "key" in group_by else {}
    return {
        "object": "usage",
        "period": period.name,
        "from": str(period.first),
        "to": str(period.last),
        **sums_as_json(whole.sums),
        "budget_usd": None,
        "groups": [_by(group.by, names) | sums_as_json(group.sums) for group in groups],
    }


def sums_as_json(sums: UsageSums) -> dict[str, int | float]:
    """Sums under the names of the API. `cost_usd` has six decimals, which are all there are."""
    return {
        "requests": sums.requests,
        "input_tokens": sums.prompt_tokens,
        "cached_tokens": sums.cached_tokens,
        "output_tokens": sums.completion_tokens,
        "reasoning_tokens": sums.reasoning_tokens,
        "withheld_tokens": sums.withheld_tokens,
        "cost_usd": round(sums.cost_micro_usd / 1_000_000, 6),
        "cost_micro_usd": sums.cost_micro_usd,
    }


def _by(by: Mapping[str, str | int | None], key_names: Mapping[str, str]) -> dict[str, Any]:
    """The names and values of a group; a key has `key_name` too, null for a key that is not stored."""
    written: dict[str, Any] = {}
    for name, value in by.items():
        written[name] = text_of(value) if isinstance(value, int) else value
        if name == "key":
            written["key_name"] = key_names.get(str(value))
    return written


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
