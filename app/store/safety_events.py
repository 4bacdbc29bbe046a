"""Decisions of the screens, as rows without text: owner, key, categories and the action taken.

Events are added and listed, never changed; deleting or purging a conversation leaves them, for there is
nothing of it in them but a keyed hash. All functions but `hmac_of` are units of the store
(app.store.database). What a verdict is, this layer does not know: it stores what it is handed.
"""

from __future__ import annotations

import hmac
import json
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from app.errors import BadRequest

Subject = Literal["prompt", "answer"]
FILTERS = ("subject", "stage", "action", "category", "owner", "key_id", "request_id", "model", "policy_hash")
"""Columns that a list can be narrowed to one value of."""
_DIGITS = 6


@dataclass(frozen=True, slots=True)
class SafetyEvent:
    """One decision. `at_us` is UTC; `text_hmac` is `hmac_of` the text that was judged."""

    at_us: int
    request_id: str
    owner: str
    key_id: str | None
    model: str
    subject: Subject
    stage: str
    action: str
    category: str | None
    score: float
    threshold: float
    policy_hash: str
    scores: Mapping[str, float] = field(default_factory=dict)
    lag_tokens: int = 0
    text_hmac: bytes | None = None


class EventPage(NamedTuple):
    """Events, newest first, each with its place; `next_cursor` is None on the last page."""

    events: list[tuple[int, SafetyEvent]]
    next_cursor: str | None


_COLUMNS = tuple(column.name for column in fields(SafetyEvent))
_NAMES = ", ".join(_COLUMNS)
_INSERT = f"INSERT INTO safety_events ({_NAMES}) VALUES ({', '.join('?' * len(_COLUMNS))})"  # noqa: S608  # our own names


def add(c: sqlite3.Connection, event: SafetyEvent) -> int:
    """Keep an event; returns its place in the order of all."""
    values = {name: getattr(event, name) for name in _COLUMNS}
    values["score"], values["threshold"] = round(event.score, _DIGITS), round(event.threshold, _DIGITS)
    values["scores"] = json.dumps({category: round(p, _DIGITS) for category, p in event.scores.items()})
    cursor = c.execute(_INSERT, tuple(values.values()))
    assert cursor.lastrowid is not None
    return cursor.lastrowid


def page(
    c: sqlite3.Connection,
    limit: int,
    cursor: str | None = None,
    only: Mapping[str, str] | None = None,
    *,
    from_us: int | None = None,
    until_us: int | None = None,
) -> EventPage:
    """A page of at most `limit` events after the cursor, newest first; `until_us` is not included.

    Raises BadRequest for a cursor that no page had, and KeyError for what is none of FILTERS.
    """
    conditions: list[str] = ["seq < ?"]
    values: list[Any] = [_position(cursor)]
    for name, value in (only or {}).items():
        if name not in FILTERS:
            raise KeyError(name)
        conditions.append(f"{name} = ?")
        values.append(value)
    for bound, operator in ((from_us, ">="), (until_us, "<")):
        if bound is not None:
            conditions.append(f"at_us {operator} ?")
            values.append(bound)
    rows = c.execute(
        f"SELECT seq, {_NAMES} FROM safety_events WHERE {' AND '.join(conditions)}"  # noqa: S608  # same
        " ORDER BY seq DESC LIMIT ?",
        (*values, limit + 1),
    ).fetchall()
    numbered = [(row[0], _event(row[1:])) for row in rows[:limit]]
    return EventPage(numbered, str(numbered[-1][0]) if len(rows) > limit else None)


def secret(c: sqlite3.Connection) -> bytes:
    """The installation's key for `hmac_of`."""
    (key,) = c.execute("SELECT key FROM safety_secret").fetchone()
    assert isinstance(key, bytes)
    return key


def hmac_of(key: bytes, text: str) -> bytes:
    """HMAC-SHA256 of a text: equal for equal texts, and of no use without the key."""
    return hmac.digest(key, text.encode("utf-8", "surrogatepass"), "sha256")


def _event(row: tuple[Any, ...]) -> SafetyEvent:
    values = dict(zip(_COLUMNS, row, strict=True))
    return SafetyEvent(**values | {"scores": json.loads(values["scores"])})


def _position(cursor: str | None) -> int:
    if cursor is None:
        return 2**63 - 1
    if not (cursor.isascii() and cursor.isdigit() and len(cursor) < 19):
        raise BadRequest(
            "cursor must be the next_cursor of an earlier page.", code="invalid_cursor", param="cursor"
        )
    return int(cursor)
