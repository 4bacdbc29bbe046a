"""Checkpoints of all live streams, written together in two statements, however many streams there are.

Each SQL statement hands the interpreter to another thread and has to get it back from one that is
busy with tokens; thousands of small ones would take their time mostly by waiting. So the rows go
in as one JSON array, and the segments as one blob that the rows point into.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from typing import NamedTuple

import orjson

from app.core import Usage


class Checkpoint(NamedTuple):
    """A live request's counts so far, and its events since the last checkpoint as one segment, if any."""

    request_seq: int
    usage: Usage
    first_id: int
    segment: bytes


# `+` keeps the planner from going through all open requests for each saved row.
_COUNTS = """
UPDATE requests SET
    prompt_tokens = row.value ->> 1, completion_tokens = row.value ->> 2, cached_tokens = row.value ->> 3,
    reasoning_tokens = row.value ->> 4, withheld_tokens = row.value ->> 5
FROM json_each(?) AS row
WHERE requests.seq = row.value ->> 0 AND +requests.state = 'reserved'
"""
_EVENTS = """
INSERT INTO events (request_seq, first_id, slice)
SELECT requests.seq, row.value ->> 6, substr(?, row.value ->> 7, row.value ->> 8)
FROM json_each(?) AS row JOIN requests ON requests.seq = row.value ->> 0
WHERE +requests.state = 'reserved' AND row.value ->> 8 > 0
ON CONFLICT (request_seq, first_id) DO UPDATE SET slice = excluded.slice
"""


def write(connection: sqlite3.Connection, checkpoints: Sequence[Checkpoint]) -> None:
    """Store counts and segments of the requests that are still open. Settled rows stay as they are."""
    segments = bytearray()
    rows: list[tuple[int, ...]] = []
    for request_seq, usage, first_id, segment in checkpoints:
        rows.append((request_seq, *usage, first_id, len(segments) + 1, len(segment)))
        segments += segment
    counts = orjson.dumps(rows).decode()
    connection.execute(_COUNTS, (counts,))
    connection.execute(_EVENTS, (bytes(segments), counts))
