"""Stored events: appended, compacted, loaded by their owner alone, forgotten."""

from __future__ import annotations

import sqlite3

import pytest

from app.core import Usage
from app.store import events
from app.store.ledger import Settlement, settle
from tests.support.ledgers import at, empty_store, reserved, settled

NOW = at("2026-11-20")
USAGE = Usage(prompt_tokens=10, completion_tokens=20, cached_tokens=4, reasoning_tokens=5, withheld_tokens=3)


@pytest.fixture
def c() -> sqlite3.Connection:
    """An empty store."""
    return empty_store()


def converse(c: sqlite3.Connection, request_seq: int) -> None:
    """Make the request one of a conversation's."""
    at_us = (NOW, NOW)
    cursor = c.execute(
        "INSERT INTO conversations (id, owner, title, model, created_at_us, updated_at_us)"
        " VALUES (?, 'local', 'Hello', 'llama', ?, ?)",
        (f"conv_{request_seq}", *at_us),
    )
    c.execute("UPDATE requests SET conversation_seq = ? WHERE seq = ?", (cursor.lastrowid, request_seq))


def keys(c: sqlite3.Connection) -> list[str | None]:
    """Every request's idempotency key."""
    return [key for (key,) in c.execute("SELECT idempotency_key FROM requests ORDER BY seq")]


def test_segments_come_in_order(c):
    """A stream's segments are its own, ordered by their first events."""
    seq, other = reserved(c), reserved(c)
    events.append(c, seq, 5, b"second")
    events.append(c, other, 1, b"other")
    events.append(c, seq, 1, b"first")
    assert events.segments(c, seq) == [b"first", b"second"]


def test_segment_written_again_replaces_itself(c):
    """A checkpoint that is tried again, longer by then, is kept once."""
    seq = reserved(c)
    events.append(c, seq, 1, b"first")
    events.append(c, seq, 1, b"first and second")
    assert events.segments(c, seq) == [b"first and second"]


def test_compacted_stream_is_one_segment(c):
    """One segment takes the place of those from its first event on; earlier ones stay."""
    seq, other = reserved(c), reserved(c)
    for first_id in (1, 4, 9):
        events.append(c, seq, first_id, b"%d" % first_id)
        events.append(c, other, first_id, b"other")
    events.compact(c, seq, 4, b"4 to the end")
    assert events.segments(c, seq) == [b"1", b"4 to the end"]
    events.compact(c, seq, 1, b"all")
    assert events.segments(c, seq) == [b"all"]
    assert len(events.segments(c, other)) == 3


def test_loads_the_row_and_its_events(c):
    """What a replay needs is there: facts, counts, how it ended, events."""
    seq = reserved(c, request_id="chatcmpl-1", stream=b'{"n":1}', created_at_us=NOW)
    events.append(c, seq, 1, b"first")
    stored = events.load(c, "chatcmpl-1", "local")
    assert (stored.state, stored.finish, stored.reconciled) == ("reserved", None, False)
    assert settle(c, Settlement(seq, USAGE, "interrupted", NOW, reconciled=True))
    assert events.load(c, "chatcmpl-1", "local") == events.StoredStream(
        request_seq=seq,
        request_id="chatcmpl-1",
        owner="local",
        model="llama",
        created_at_us=NOW,
        state="settled",
        finish="interrupted",
        usage=USAGE,
        reconciled=True,
        stream=b'{"n":1}',
        segments=[b"first"],
    )


def test_another_owners_stream_is_not_there(c):
    """A foreign or unknown id loads as nothing."""
    settled(c, USAGE, request_id="chatcmpl-1", owner="ann")
    assert events.load(c, "chatcmpl-1", "ann") is not None
    assert events.load(c, "chatcmpl-1", "bob") is None
    assert events.load(c, "chatcmpl-2", "ann") is None


def test_key_finds_its_owners_newest_request(c):
    """A key is its owner's; of several settled requests with it the newest counts."""
    fields = {"idempotency_key": "k", "fingerprint": b"f"}
    for request_id in ("chatcmpl-1", "chatcmpl-2"):
        settled(c, USAGE, request_id=request_id, owner="ann", **fields)
    reserved(c, request_id="chatcmpl-3", owner="ann", **fields)
    assert events.find_by_key(c, "ann", "k") == ("chatcmpl-2", b"f")
    assert events.find_by_key(c, "bob", "k") is None
    assert events.find_by_key(c, "ann", "other") is None


def test_freed_key_finds_nothing(c):
    """A caller who was told to send a request again may use its key again."""
    seq = settled(c, USAGE, idempotency_key="k", fingerprint=b"f")
    events.free_idempotency_key(c, seq)
    assert events.find_by_key(c, "local", "k") is None


@pytest.mark.parametrize("hide", ["UPDATE conversations SET deleted_at_us = 1", "DELETE FROM conversations"])
def test_deleted_conversation_hides_its_streams(c, hide: str):
    """Soft-deleted or purged, a conversation's streams are not replayed; restored, they are."""
    seq = settled(c, USAGE, request_id="chatcmpl-1", idempotency_key="k", fingerprint=b"f")
    converse(c, seq)
    assert events.load(c, "chatcmpl-1", "local") is not None
    c.execute(hide)
    assert events.load(c, "chatcmpl-1", "local") is None
    assert events.find_by_key(c, "local", "k") is None
    c.execute("UPDATE conversations SET deleted_at_us = NULL")
    assert (events.load(c, "chatcmpl-1", "local") is None) == hide.startswith("DELETE")


def test_forgets_one_request(c):
    """A request's events go, another's stay."""
    seq, other = reserved(c), reserved(c)
    events.append(c, seq, 1, b"first")
    events.append(c, other, 1, b"first")
    events.forget(c, seq)
    assert events.segments(c, seq) == []
    assert events.segments(c, other) == [b"first"]


def test_unstored_requests_are_forgotten(c):
    """Settled, old and without a conversation: events and key go, the counts stay."""
    seq = settled(c, USAGE, request_id="chatcmpl-1", idempotency_key="k", fingerprint=b"f", created_at_us=NOW)
    events.append(c, seq, 1, b"first")
    assert events.forget_unstored(c, NOW) == 0
    assert events.forget_unstored(c, NOW + 1) == 1
    assert events.forget_unstored(c, NOW + 1) == 0
    assert events.segments(c, seq) == []
    assert keys(c) == [None]
    assert events.load(c, "chatcmpl-1", "local") is None
    assert c.execute("SELECT completion_tokens, cost_micro_usd > 0 FROM requests").fetchone() == (20, 1)


def test_others_are_not_forgotten(c):
    """A request that runs still, or belongs to a conversation, keeps its events and key."""
    running = reserved(c, idempotency_key="running", created_at_us=NOW)
    stored = settled(c, USAGE, idempotency_key="stored", created_at_us=NOW)
    converse(c, stored)
    for seq in (running, stored):
        events.append(c, seq, 1, b"first")
    assert events.forget_unstored(c, NOW * 2) == 0
    assert keys(c) == ["running", "stored"]
    assert events.segments(c, running) == events.segments(c, stored) == [b"first"]


def test_forgets_in_batches(c, monkeypatch):
    """One unit takes on a bounded number of requests, the oldest first."""
    monkeypatch.setattr(events, "LIMIT", 2)
    seqs = [settled(c, USAGE, created_at_us=NOW + age) for age in (3, 1, 2)]
    for seq in seqs:
        events.append(c, seq, 1, b"first")
    assert events.forget_unstored(c, NOW + 10) == 2
    assert [bool(events.segments(c, seq)) for seq in seqs] == [True, False, False]
    assert events.forget_unstored(c, NOW + 10) == 1


def test_forgotten_requests_are_not_looked_at_again(c):
    """The search uses the index of those that are left, however many were forgotten."""
    query = []
    settled(c, USAGE)
    c.set_trace_callback(query.append)
    events.forget_unstored(c, NOW * 2)
    c.set_trace_callback(None)
    (plan,) = c.execute(f"EXPLAIN QUERY PLAN {query[0]}").fetchall()
    assert "USING INDEX requests_unstored" in plan[3] or "COVERING INDEX requests_unstored" in plan[3]
