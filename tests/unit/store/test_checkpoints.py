"""Checkpoints of many streams in two statements."""

from __future__ import annotations

import sqlite3

import pytest

from app.core import Usage
from app.store import checkpoints, events
from app.store.checkpoints import Checkpoint
from app.store.ledger import Settlement, settle, unsettled_requests
from tests.support.ledgers import empty_store, reserved


@pytest.fixture
def c() -> sqlite3.Connection:
    """An empty store."""
    return empty_store()


def test_each_request_gets_its_own_counts_and_segment(c: sqlite3.Connection):
    """Segments of any bytes and lengths come apart again."""
    pieces = [b"\x00\xff" * 700, b"x", bytes(range(256))]
    seqs = [reserved(c) for _ in pieces]
    checkpoints.write(
        c, [Checkpoint(s, Usage(10, s, 1, 2, 3), 1, piece) for s, piece in zip(seqs, pieces, strict=True)]
    )
    assert [events.segments(c, seq) for seq in seqs] == [[piece] for piece in pieces]
    assert [r.usage for r in unsettled_requests(c)] == [Usage(10, seq, 1, 2, 3) for seq in seqs]


def test_segments_follow_each_other(c: sqlite3.Connection):
    """Later events are another segment; one that begins at the same event replaces it."""
    seq = reserved(c)
    for first_id, piece in ((1, b"a"), (2, b"b"), (2, b"bc")):
        checkpoints.write(c, [Checkpoint(seq, Usage(), first_id, piece)])
    assert events.segments(c, seq) == [b"a", b"bc"]


def test_a_settled_request_stays_as_it_is(c: sqlite3.Connection):
    """A checkpoint that comes late brings back neither counts nor text."""
    seq = reserved(c)
    settle(c, Settlement(seq, Usage(10, 5), "stop", 1))
    checkpoints.write(c, [Checkpoint(seq, Usage(10, 99), 1, b"late")])
    assert events.segments(c, seq) == []
    assert c.execute("SELECT completion_tokens FROM requests").fetchone() == (5,)


def test_unknown_requests_are_passed_over(c: sqlite3.Connection):
    """What was never reserved leaves nothing, and does not stop the others."""
    seq = reserved(c)
    checkpoints.write(c, [Checkpoint(999, Usage(), 1, b"x"), Checkpoint(seq, Usage(10, 1), 1, b"y")])
    assert events.segments(c, 999) == []
    assert events.segments(c, seq) == [b"y"]
