"""Usage is read from the daily sums, which are those of the rows."""

from __future__ import annotations

import sqlite3

import pytest

from app.core import Usage
from app.store.ledger import Price
from app.store.usage import UsageDifference, UsageSums, differences, rebuild, usage, usage_body
from tests.support.ledgers import at, empty_store, reserved, settled

ONE = UsageSums(requests=1, prompt_tokens=10, completion_tokens=20, cost_micro_usd=1)


@pytest.fixture
def c() -> sqlite3.Connection:
    """Six requests over three days, two models and two owners, at a micro-dollar each; one is open."""
    connection = empty_store()
    for day, model, owner in (
        ("2026-11-20", "llama", "ann"),
        ("2026-11-20", "llama", "bob"),
        ("2026-11-20", "qwen", "ann"),
        ("2026-11-21", "llama", "ann"),
        ("2026-12-01", "llama", "ann"),
    ):
        settled(connection, Usage(10, 20), model=model, owner=owner, created_at_us=at(day), price=Price(100))
    reserved(connection, owner="ann", created_at_us=at("2026-11-20"))
    return connection


def times(number: int) -> UsageSums:
    """The sums of that many of the requests."""
    return UsageSums(*(number * value for value in ONE))


@pytest.mark.parametrize(
    ("from_day", "to_day", "owner", "number"),
    [
        (20261101, 20261130, None, 4),
        (20261101, 20261130, "ann", 3),
        (20261120, 20261120, None, 3),
        (20261121, 20261201, None, 2),
        (20261101, 20261231, "eve", 0),
        (20270101, 20270131, None, 0),
    ],
)
def test_a_period_has_both_its_days(c, from_day: int, to_day: int, owner: str | None, number: int):
    """Ungrouped usage is one group: the settled requests of the days, the last included, of an owner."""
    [group] = usage(c, from_day, to_day, (), owner=owner)
    assert group.by == {}
    assert group.sums == times(number)


def test_groups_come_in_the_order_asked_for(c: sqlite3.Connection):
    """Each combination that occurs is a group, sorted by the first name first."""
    groups = usage(c, 20261101, 20261130, ("model", "day"))
    assert [(tuple(g.by.items()), g.sums.requests) for g in groups] == [
        ((("model", "llama"), ("day", 20261120)), 2),
        ((("model", "llama"), ("day", 20261121)), 1),
        ((("model", "qwen"), ("day", 20261120)), 1),
    ]


def test_usage_of_an_owner(c: sqlite3.Connection):
    """Grouped by owner, usage has a group for each."""
    assert [(g.by, g.sums) for g in usage(c, 20261101, 20261130, ("owner",))] == [
        ({"owner": "ann"}, times(3)),
        ({"owner": "bob"}, times(1)),
    ]


def test_usage_of_a_key_has_its_owner_too(c: sqlite3.Connection):
    """Keys of one owner are told apart; a request without a stored key is of the key `none`."""
    for key_id in ("tr-1", "tr-2", "tr-2"):
        settled(c, Usage(10, 20), owner="ann", key_id=key_id, price=Price(100))
    assert [(g.by, g.sums) for g in usage(c, 20261101, 20261130, ("key",), owner="ann")] == [
        ({"key": "none", "owner": "ann"}, times(3)),
        ({"key": "tr-1", "owner": "ann"}, times(1)),
        ({"key": "tr-2", "owner": "ann"}, times(2)),
    ]
    assert usage(c, 20261101, 20261130, ("key", "owner"))[0].by == {"key": "none", "owner": "ann"}
    [group] = usage(c, 20261101, 20261130, (), key_id="tr-2")
    assert group.sums == times(2)
    assert differences(c) == []


@pytest.mark.parametrize("name", ["project", "a b", "a.b", "$[0]", "größe", "'; DROP TABLE requests; --"])
def test_usage_by_what_requests_were_labelled(c: sqlite3.Connection, name: str):
    """A name of metadata is a group, whatever it is; requests without it are one group of no value."""
    for value in ("x", "y", "y"):
        settled(c, Usage(10, 20), owner="ann", metadata={"other": "z", name: value}, price=Price(100))
    groups = usage(c, 20261101, 20261130, (f"metadata.{name}",))
    assert [(g.by[f"metadata.{name}"], g.sums) for g in groups] == [
        (None, times(4)),
        ("x", times(1)),
        ("y", times(2)),
    ]
    assert [g.by for g in usage(c, 20261120, 20261120, ("owner", f"metadata.{name}"), limit=1)] == [
        {"owner": "ann", f"metadata.{name}": None}
    ]


def test_text_that_is_no_unicode_does_not_break_a_report(c: sqlite3.Connection):
    """A lone surrogate, which JSON can send, is kept as a question mark."""
    settled(c, Usage(10, 20), metadata={"project": "a\ud800"})
    assert usage(c, 20261101, 20261130, ("metadata.project",))[-1].by == {"metadata.project": "a?"}


def test_usage_reads_no_request(c: sqlite3.Connection):
    """What a period costs to read depends on its days, not on its requests."""
    tables = set()

    def note(action: int, table: str | None, *_: object) -> int:
        if action == sqlite3.SQLITE_READ:
            tables.add(table)
        return sqlite3.SQLITE_OK

    c.set_authorizer(note)
    usage(c, 20261101, 20261130, ("day", "model"))
    assert tables == {"usage_daily"}


def test_the_books_balance(c: sqlite3.Connection):
    """Sums kept by settlements are those of the rows."""
    assert differences(c) == []


@pytest.mark.parametrize(
    ("tamper", "kept", "rows"),
    [
        ("UPDATE usage_daily SET cost_micro_usd = 2", ONE._replace(cost_micro_usd=2), ONE),
        ("UPDATE usage_daily SET withheld_tokens = 1", ONE._replace(withheld_tokens=1), ONE),
        ("DELETE FROM usage_daily", None, ONE),
    ],
)
def test_one_difference_is_found(c: sqlite3.Connection, tamper: str, kept: UsageSums | None, rows: UsageSums):
    """A sum that was changed is named with its day, model, owner and key, and what it should be."""
    c.execute(f"{tamper} WHERE owner = 'bob'")
    assert differences(c) == [UsageDifference(20261120, "llama", "bob", "none", kept, rows)]


def test_a_sum_without_rows_is_found(c: sqlite3.Connection):
    """A request that is gone leaves its sum to be seen."""
    c.execute("DELETE FROM requests WHERE owner = 'bob'")
    assert differences(c) == [UsageDifference(20261120, "llama", "bob", "none", ONE, None)]


def test_rebuilding_puts_a_day_right(c: sqlite3.Connection):
    """After a rebuild the day's sums are those of its rows again, and other days are as they were."""
    before = c.execute("SELECT * FROM usage_daily").fetchall()
    c.execute("UPDATE usage_daily SET requests = 9 WHERE owner = 'bob'")
    c.execute("INSERT INTO usage_daily VALUES (20261120, 'x', 'y', 'none', 1, 1, 1, 1, 1, 1, 1)")
    c.execute("INSERT INTO usage_daily VALUES (20200101, 'x', 'y', 'none', 1, 1, 1, 1, 1, 1, 1)")
    assert rebuild(c, 20261120) == 2
    assert [difference.day for difference in differences(c)] == [20200101]
    assert rebuild(c, 20200101) == 1
    assert rebuild(c, 20261120) == 0
    assert c.execute("SELECT * FROM usage_daily").fetchall() == before


def test_sums_without_rows_are_dropped(c: sqlite3.Connection):
    """A rebuilt day has what its rows have, and nothing else."""
    c.execute("INSERT INTO usage_daily VALUES (20200101, 'gone', 'ann', 'none', 3, 1, 1, 0, 0, 0, 1)")
    assert rebuild(c, 20200101) == 1
    assert differences(c) == []


def test_withheld_tokens_stand_beside_those_that_are_billed():
    """Not among the completion tokens, nor in the total."""
    assert usage_body(Usage(10, 7, 4, 2, 3)) == {
        "prompt_tokens": 10,
        "completion_tokens": 4,
        "total_tokens": 14,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": {"reasoning_tokens": 2, "withheld_tokens": 3},
    }


def test_where_all_was_released_nothing_is_said_of_withheld_tokens():
    """OpenAI's object has no such field."""
    assert usage_body(Usage(10, 7, 4, 2))["completion_tokens_details"] == {"reasoning_tokens": 2}
