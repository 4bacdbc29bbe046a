"""Usage: a request's as OpenAI's object, a period's from the daily sums, and the check of these sums.

The sums are kept by `app.store.ledger.settle`, so that a month of a million rows is read from
some hundred. Callers' `metadata` is in the rows alone: groups by it are read from them.
`differences` adds the rows up again, and `rebuild` puts a day's sums right.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple

from app.core import Usage

_COLUMNS: Mapping[str, Sequence[str]] = {
    "day": ("day",),
    "model": ("model",),
    "owner": ("owner",),
    "key": ("key_id", "owner"),
}
GROUPS = tuple(_COLUMNS)
METADATA = "metadata."
"""The prefix of a group that is a name of the callers' `metadata`."""
_KEY = ("day", "model", "owner", "key_id")
_KEY_NAMES = ", ".join(_KEY)

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
_SUMS = ", ".join(f"coalesce(sum({name}), 0)" for name in _SUMMED)
_ROW_SUMS = ", ".join(["count(*)", *(f"sum({name})" for name in _SUMMED[1:])])
_OF_ROWS = (
    f"SELECT {_KEY_NAMES}, {_ROW_SUMS} FROM requests"  # noqa: S608  # our own names
    " WHERE state = 'settled'"
)
_KEPT = f"SELECT {_KEY_NAMES}, {_NAMES} FROM usage_daily WHERE true"  # noqa: S608  # same
_OF_PERIOD = " day BETWEEN ? AND ? AND (? IS NULL OR owner = ?) AND (? IS NULL OR key_id = ?)"


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

    by: dict[str, str | int | None]
    sums: UsageSums


class UsageDifference(NamedTuple):
    """A day's sums that are not those of its rows; None where there are none at all."""

    day: int
    model: str
    owner: str
    key_id: str
    kept: UsageSums | None
    rows: UsageSums | None


def usage(
    c: sqlite3.Connection,
    from_day: int,
    to_day: int,
    group_by: Sequence[str],
    *,
    owner: str | None = None,
    key_id: str | None = None,
    limit: int = -1,
) -> list[Group]:
    """The sums of two days (as 20261121) and those between, by group in the order asked for.

    Without `group_by`, exactly one group. `owner` and `key_id` None mean everyone's. Grouped by `key`, a
    group has the `owner` too. At most `limit` groups are read; -1 is all.
    """
    of_period = (from_day, to_day, owner, owner, key_id, key_id)
    names = list(dict.fromkeys(chain.from_iterable(_COLUMNS.get(name, (name,)) for name in group_by)))
    paths = [f'$."{name.removeprefix(METADATA)}"' for name in names if name.startswith(METADATA)]
    columns = ", ".join("json_extract(metadata, ?)" if name.startswith(METADATA) else name for name in names)
    ordinals = ", ".join(str(place + 1) for place in range(len(names)))
    grouped = f" GROUP BY {ordinals} ORDER BY {ordinals} LIMIT ?" if names else ""
    sums = (
        f"{_ROW_SUMS} FROM requests WHERE state = 'settled' AND"
        if paths
        else f"{_SUMS} FROM usage_daily WHERE"
    )
    rows = c.execute(
        f"SELECT {columns}{', ' if columns else ''}{sums}{_OF_PERIOD}{grouped}",
        (*paths, *of_period, *((limit,) if names else ())),
    )
    width = len(names)
    by = ["key" if name == "key_id" else name for name in names]
    return [Group(dict(zip(by, row[:width], strict=True)), UsageSums(*row[width:])) for row in rows]


def differences(c: sqlite3.Connection, day: int | None = None) -> list[UsageDifference]:
    """The differences between the kept sums and the settled rows, of a day or of all days."""
    where, days = ("", ()) if day is None else (" AND day = ?", (day,))
    of_rows = _by_key(c.execute(f"{_OF_ROWS}{where} GROUP BY {_KEY_NAMES}", days))
    kept = _by_key(c.execute(_KEPT + where, days))
    return [
        UsageDifference(*key, kept.get(key), of_rows.get(key))
        for key in sorted(kept.keys() | of_rows.keys())
        if kept.get(key) != of_rows.get(key)
    ]


def rebuild(c: sqlite3.Connection, day: int) -> int:
    """Make the kept sums of a day those of its settled rows; returns how many differed."""
    num_unequal = len(differences(c, day))
    c.execute("DELETE FROM usage_daily WHERE day = ?", (day,))
    c.execute(
        f"INSERT INTO usage_daily ({_KEY_NAMES}, {_NAMES}) {_OF_ROWS} AND day = ? GROUP BY {_KEY_NAMES}",
        (day,),
    )
    return num_unequal


def _by_key(rows: sqlite3.Cursor) -> dict[tuple[int, str, str, str], UsageSums]:
    return {(day, model, owner, key_id): UsageSums(*sums) for day, model, owner, key_id, *sums in rows}


def usage_body(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage object over all choices; `completion_tokens` are those that were released.

    Tokens that were generated and never released are not billed: `withheld_tokens`, where there are any,
    are beside them, not among them.
    """
    released_tokens = usage.completion_tokens - usage.withheld_tokens
    details = {"reasoning_tokens": usage.reasoning_tokens}
    if usage.withheld_tokens:
        details["withheld_tokens"] = usage.withheld_tokens
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": released_tokens,
        "total_tokens": usage.reported_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": details,
    }
