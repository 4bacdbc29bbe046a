"""Safety records: kept without text, counted by group, deleted by whole days."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from dataclasses import fields, replace

import pytest

from app.store import safety_records
from app.store.safety_records import SafetyRecord, Total, add, records, totals, trim
from app.store.schema import MIGRATIONS, migrate

RECORD = SafetyRecord(
    at_us=1_790_000_000_000_000,
    day=20260921,
    key_id="tr-1",
    subject="prompt",
    stage="encoder",
    action="block",
    done=None,
    category="S2",
    score=0.91,
    threshold=0.62,
    policy_hash="0123456789abcdef",
    length="0-99",
    role="user",
    script="latin",
    again=False,
    watched=True,
    readings=[("ngrams", 1, False, {"S2": 0.4}), ("encoder", 3, True, {"S1": 0.5, "S2": 0.91})],
)
TOTAL = Total(20260921, "tr-1", "prompt", "0123456789abcdef", "0-99", "user", "latin")


@pytest.fixture
def c() -> Iterator[sqlite3.Connection]:
    """An empty store in memory."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection, MIGRATIONS)
    yield connection
    connection.close()


def every(c: sqlite3.Connection) -> list[SafetyRecord]:
    """All records."""
    return list(records(c, 0, 99_999_999))


def test_a_record_comes_back_as_it_went_in(c):
    """Every field; of scores those that any policy could make something of, rounded."""
    nothing = replace(RECORD, action=None, category=None, again=True, watched=False, readings=[])
    rounded = replace(RECORD, readings=[("encoder", 1, False, {"S1": 1 / 3, "S5": 0.0001})], score=1 / 3)
    add(c, [RECORD, nothing, rounded], {})
    first, second, third = every(c)
    assert first == RECORD
    assert second == nothing
    assert (third.score, third.readings) == (0.333333, [("encoder", 1, False, {"S1": 0.333333})])


def test_there_is_no_place_for_a_text():
    """No field names a request, an owner or a text."""
    names = {field.name for field in fields(SafetyRecord)}
    assert not names & {"text", "request_id", "owner", "text_hmac", "messages", "conversation_id"}


def test_texts_add_up(c):
    """By day, key, subject, policy and group."""
    add(c, [], {TOTAL: 2})
    add(c, [], {TOTAL: 3, TOTAL._replace(subject="answer"): 1})
    assert totals(c, 20260921, 20260921) == {TOTAL: 5, TOTAL._replace(subject="answer"): 1}
    assert totals(c, 20260922, 20260930) == {}


def test_days_are_chosen(c):
    """Both are included."""
    add(c, [replace(RECORD, day=day) for day in (20260919, 20260920, 20260921, 20260922)], {})
    assert [record.day for record in records(c, 20260920, 20260921)] == [20260920, 20260921]


def test_old_days_go_with_their_totals(c):
    """And nothing else."""
    for day in (20260919, 20260920, 20260921):
        add(c, [replace(RECORD, day=day)], {TOTAL._replace(day=day): 10})
    assert trim(c, 20260921)
    assert [record.day for record in every(c)] == [20260921]
    assert list(totals(c, 0, 99_999_999)) == [TOTAL]


def test_the_oldest_days_go_while_there_are_too_many(c):
    """Whole ones, so that no rate is of half a day; the newest stays."""
    for day in (20260919, 20260920, 20260921):
        add(c, [replace(RECORD, day=day)] * 3, {TOTAL._replace(day=day): 10})
    assert trim(c, 0, limit=5)
    assert {record.day for record in every(c)} == {20260921}
    assert {total.day for total in totals(c, 0, 99_999_999)} == {20260921}
    assert trim(c, 0, limit=1)
    assert len(every(c)) == 3


def test_a_deletion_goes_by_pieces(c, monkeypatch):
    """It holds the writer for a bounded number of rows; the totals go first."""
    monkeypatch.setattr(safety_records, "DELETED_AT_ONCE", 4)
    add(c, [replace(RECORD, day=20260919)] * 10, {TOTAL._replace(day=20260919): 10})
    add(c, [RECORD], {TOTAL: 1})
    done = [trim(c, 20260921) for _ in range(4)]
    assert done == [False, False, True, True]
    assert every(c) == [RECORD]


def test_a_day_that_was_begun_to_be_deleted_goes_whole(c, monkeypatch):
    """Though no more than the limit is left after a piece of it: the totals of that day are gone already."""
    monkeypatch.setattr(safety_records, "DELETED_AT_ONCE", 2)
    for day in (20260919, 20260920):
        add(c, [replace(RECORD, day=day)] * 5, {TOTAL._replace(day=day): 10})
    while not trim(c, 0, limit=9):
        pass
    assert [record.day for record in every(c)] == [20260920] * 5
    assert list(totals(c, 0, 99_999_999)) == [TOTAL._replace(day=20260920)]


def test_a_key_keeps_its_level_in_the_migration():
    """From a store whose keys could be standard or strict only."""
    connection = sqlite3.connect(":memory:", isolation_level=None)
    migrate(connection, MIGRATIONS[:1])
    for number, level in enumerate(("standard", "strict")):
        connection.execute(
            "INSERT INTO keys (id, owner, name, scope, tier, created_at_us, safety) VALUES (?, 'a', 'n',"
            " 'chat', 'batch', 0, ?)",
            (f"tr-{number}", level),
        )
    migrate(connection, MIGRATIONS)
    assert connection.execute("SELECT safety FROM keys ORDER BY seq").fetchall() == [
        ("standard",),
        ("strict",),
    ]
    connection.execute("UPDATE keys SET safety = 'observe'")
    with pytest.raises(sqlite3.IntegrityError):
        connection.execute("UPDATE keys SET safety = 'off'")
    connection.close()
