"""Verdicts of the policy on traffic, as rows without text, and the number of texts that were read.

A record is a prompt or an answer of which some policy could make something; what no policy minds is in the
totals alone. `tokenring safety report` reads both. Whole days go at once, so that the rates of a day are
those of all its texts. All functions are units of the store (app.store.database). What a verdict is, this
layer does not know: it stores what it is handed.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

MAX_RECORDS = 200_000
"""Records left at the beginning of a day, 50 to 100 MB: the oldest days go first.

A process adds at most as many in a day.
"""
DELETED_AT_ONCE = 500
"""Records that one unit deletes: it holds the writer, and streams wait for it."""
_DIGITS = 6
_MIN_SCORE = 0.001
"""A lower score of a category is not kept; no policy has so low a threshold."""


class Total(NamedTuple):
    """The group in which a text is counted. `day` is in UTC, as 20261121; an empty `key_id` is no stored key.

    `length`, `role` and `script` are the group of the request (app.safety.text.groups).
    """

    day: int
    key_id: str
    subject: Literal["prompt", "answer"]
    policy_hash: str
    length: str
    role: str
    script: str


@dataclass(frozen=True, slots=True)
class SafetyRecord:
    """A text that some policy could make something of. `at_us` is the hour in UTC, `day` as in Total.

    `action` is what the policy in force says, `done` what was done: nothing by a policy that observes.
    `again` says that an earlier turn of the conversation was recorded too; `watched` that the policy would
    have watched the prompt. `readings` are the scores, each with the stage that gave them, the number of
    slices, and whether it can only watch (app.safety.verdict.Reading).
    """

    at_us: int
    day: int
    key_id: str
    subject: Literal["prompt", "answer"]
    stage: str
    action: str | None
    done: str | None
    category: str | None
    score: float
    threshold: float
    policy_hash: str
    length: str
    role: str
    script: str
    again: bool
    watched: bool
    readings: Sequence[tuple[str, int, bool, Mapping[str, float]]]


_COLUMNS = tuple(field.name for field in fields(SafetyRecord))
_NAMES = ", ".join(_COLUMNS)
_INSERT = f"INSERT INTO safety_records ({_NAMES}) VALUES ({', '.join('?' * len(_COLUMNS))})"  # noqa: S608  # our own names
_ADD = (
    f"INSERT INTO safety_totals ({', '.join(Total._fields)}, texts) VALUES (?, ?, ?, ?, ?, ?, ?, ?)"  # noqa: S608  # same
    " ON CONFLICT DO UPDATE SET texts = texts + excluded.texts"
)


def add(c: sqlite3.Connection, records: Sequence[SafetyRecord], totals: Mapping[Total, int]) -> None:
    """Keep records, and count texts."""
    c.executemany(_INSERT, map(_row, records))
    c.executemany(_ADD, ((*total, texts) for total, texts in totals.items()))


def records(c: sqlite3.Connection, first_day: int, last_day: int) -> Iterator[SafetyRecord]:
    """The records of these days, both included, oldest first."""
    rows = c.execute(
        f"SELECT {_NAMES} FROM safety_records WHERE day BETWEEN ? AND ? ORDER BY seq",  # noqa: S608  # same
        (first_day, last_day),
    )
    for row in rows:
        values = dict(zip(_COLUMNS, row, strict=True))
        readings = [
            (stage, texts, bool(watch), scores)
            for stage, texts, watch, scores in json.loads(values["readings"])
        ]
        flags = {name: bool(values[name]) for name in ("again", "watched")}
        yield SafetyRecord(**values | flags | {"readings": readings})


def totals(c: sqlite3.Connection, first_day: int, last_day: int) -> dict[Total, int]:
    """The number of texts read on these days, both included."""
    rows = c.execute(
        f"SELECT {', '.join(Total._fields)}, texts FROM safety_totals WHERE day BETWEEN ? AND ?",  # noqa: S608  # same
        (first_day, last_day),
    )
    return {Total(*row): texts for *row, texts in rows}


def trim(c: sqlite3.Connection, from_day: int, limit: int = MAX_RECORDS) -> bool:
    """Delete days before `from_day`, and the oldest while there are more than `limit` records.

    Deletes a bounded number of rows; returns True when done. The newest day expires by its age alone.
    """
    days = c.execute("SELECT day, count(*) FROM safety_records GROUP BY day ORDER BY day").fetchall()
    # A day without totals is one that an earlier unit has begun to delete.
    counted = {day for (day,) in c.execute("SELECT DISTINCT day FROM safety_totals")}
    from_day = max([from_day, *(day + 1 for day, _ in days if day not in counted)])
    kept = sum(count for _, count in days)
    for day, count in days[:-1]:
        if day >= from_day and kept <= limit:
            break
        kept -= count
        from_day = max(from_day, day + 1)
    # The totals go first: a day with totals and without all of its records would have rates that are too low.
    c.execute("DELETE FROM safety_totals WHERE day < ?", (from_day,))
    deleted = c.execute(
        "DELETE FROM safety_records WHERE seq IN"
        " (SELECT seq FROM safety_records WHERE day < ? ORDER BY seq LIMIT ?)",
        (from_day, DELETED_AT_ONCE),
    )
    return deleted.rowcount < DELETED_AT_ONCE


def _row(record: SafetyRecord) -> tuple[Any, ...]:
    values = {name: getattr(record, name) for name in _COLUMNS}
    values["score"], values["threshold"] = round(record.score, _DIGITS), round(record.threshold, _DIGITS)
    values["readings"] = json.dumps(
        [[stage, texts, int(watch), _kept(scores)] for stage, texts, watch, scores in record.readings],
        separators=(",", ":"),
    )
    return tuple(values.values())


def _kept(scores: Mapping[str, float]) -> dict[str, float]:
    return {category: round(p, _DIGITS) for category, p in scores.items() if p >= _MIN_SCORE}
