"""Usage from the daily sums, and the check that these sums are those of their rows.

The sums are kept by `app.store.ledger.settle`, so that a month of a million rows is read from
some hundred. `differences` adds the rows up again, and `rebuild` puts a day's sums right.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

from app.store.connection import BatchConnection

GroupBy = Literal["day", "model", "key"]
GROUPS: tuple[GroupBy, ...] = get_args(GroupBy)
_COLUMNS = {"day": "day", "model": "model", "key": "owner"}

_SUMMED = (
    "requests",
    "prompt_tokens",
    "completion_tokens",
    "cached_tokens",
    "reasoning_tokens",
    "withheld_tokens",
    "cost_micro_usd",
)
_NAMES = ", ".join(_SUMMED)
_PLACES = ", ".join("?" * (3 + len(_SUMMED)))
_SUMS = ", ".join(f"coalesce(sum({name}), 0)" for name in _SUMMED)
_ROW_SUMS = ", ".join(["count(*)", *(f"sum({name})" for name in _SUMMED[1:])])
_OF_ROWS = (
    f"SELECT day, model, owner, {_ROW_SUMS} FROM requests"  # noqa: S608  # our own names
    " WHERE state = 'settled'"
)
_KEPT = f"SELECT day, model, owner, {_NAMES} FROM usage_daily WHERE true"  # noqa: S608  # same


class UsageSums(NamedTuple):
    """Settled requests added up."""

    requests: int = 0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    withheld_tokens: int = 0
    cost_micro_usd: int = 0


class Group(NamedTuple):
    """The sums of one group: a value for each name that it was asked to be grouped by."""

    by: dict[GroupBy, str | int]
    sums: UsageSums


class UsageDifference(NamedTuple):
    """A day's sums that are not those of its rows; None where there are none at all."""

    day: int
    model: str
    owner: str
    kept: UsageSums | None
    rows: UsageSums | None


def usage(
    c: sqlite3.Connection,
    from_day: int,
    to_day: int,
    group_by: Sequence[GroupBy],
    *,
    owner: str | None = None,
) -> list[Group]:
    """The sums of two days (as 20261121) and those between, by group in the order asked for.

    Without `group_by`, exactly one group. `owner` None means everyone's.
    """
    columns = ", ".join(_COLUMNS[name] for name in group_by)
    grouped = f" GROUP BY {columns} ORDER BY {columns}" if columns else ""
    rows = c.execute(
        f"SELECT {columns + ', ' if columns else ''}{_SUMS} FROM usage_daily"  # noqa: S608  # same
        f" WHERE day BETWEEN ? AND ? AND (? IS NULL OR owner = ?){grouped}",
        (from_day, to_day, owner, owner),
    )
    width = len(group_by)
    return [Group(dict(zip(group_by, row[:width], strict=True)), UsageSums(*row[width:])) for row in rows]


def cost_in_batch(c: sqlite3.Connection, from_day: int, to_day: int, owner: str) -> int:
    """The cost of an owner's requests of these days, those settled earlier in the same batch included."""
    if isinstance(c, BatchConnection):
        c.run_hooks()
    [group] = usage(c, from_day, to_day, (), owner=owner)
    return group.sums.cost_micro_usd


def differences(c: sqlite3.Connection, day: int | None = None) -> list[UsageDifference]:
    """The differences between the kept sums and the settled rows, of a day or of all days."""
    where, days = ("", ()) if day is None else (" AND day = ?", (day,))
    of_rows = _by_key(c.execute(f"{_OF_ROWS}{where} GROUP BY day, model, owner", days))
    kept = _by_key(c.execute(_KEPT + where, days))
    return [
        UsageDifference(*key, kept.get(key), of_rows.get(key))
        for key in sorted(kept.keys() | of_rows.keys())
        if kept.get(key) != of_rows.get(key)
    ]


def rebuild(c: sqlite3.Connection, day: int) -> int:
    """Make the kept sums of a day those of its settled rows; returns how many differed."""
    unequal = differences(c, day)
    for difference in unequal:
        c.execute("DELETE FROM usage_daily WHERE (day, model, owner) = (?, ?, ?)", difference[:3])
        if difference.rows is not None:
            c.execute(
                f"INSERT INTO usage_daily (day, model, owner, {_NAMES}) VALUES ({_PLACES})",  # noqa: S608  # same
                (*difference[:3], *difference.rows),
            )
    return len(unequal)


def _by_key(rows: sqlite3.Cursor) -> dict[tuple[int, str, str], UsageSums]:
    return {(day, model, owner): UsageSums(*sums) for day, model, owner, *sums in rows}
