"""The ledger's verbs: reserved once, settled once, rounded once."""

from __future__ import annotations

import sqlite3
from contextlib import closing

import pytest

from app.core import Usage
from app.store.batch import commit_together
from app.store.ledger import (
    AlreadySettled,
    BillingTerms,
    Price,
    Reservation,
    Settlement,
    SettleUnit,
    completion_tokens_of,
    cost_micro_usd,
    day_of,
    reserve,
    settle,
    unsettled_requests,
)
from app.store.schema import MIGRATIONS, migrate
from tests.support.ledgers import at, checkpoint, empty_store, reserved, settled

USAGE = Usage(prompt_tokens=10, completion_tokens=20, cached_tokens=4, reasoning_tokens=5, withheld_tokens=3)
COST = 29  # (10 - 4) * 0.5 + 4 * 0.05 + (20 - 3) * 1.5 = 28.7


@pytest.fixture
def c() -> sqlite3.Connection:
    """An empty store."""
    return empty_store()


def row(c: sqlite3.Connection, seq: int, *columns: str) -> tuple[object, ...]:
    """Some columns of a request."""
    return c.execute(f"SELECT {', '.join(columns)} FROM requests WHERE seq = ?", (seq,)).fetchone()


def days(c: sqlite3.Connection) -> list[tuple[object, ...]]:
    """The daily sums, briefly."""
    return c.execute("SELECT day, requests, completion_tokens, cost_micro_usd FROM usage_daily").fetchall()


@pytest.mark.parametrize(
    ("usage", "price", "cost"),
    [
        (Usage(), Price(500, 50, 1500), 0),
        (Usage(1000, 1000), Price(500, 50, 1500), 2000),
        (Usage(1), Price(499), 0),
        (Usage(1), Price(500), 1),
        (Usage(3), Price(500), 2),
        (Usage(5), Price(500), 3),
        (Usage(1), Price(1499), 1),
        (Usage(1), Price(1500), 2),
        # Rounded once: 0.4 + 0.4 + 0.4 is 1.2, where each part alone would be nothing.
        (Usage(2, 1, cached_tokens=1), Price(400, 400, 400), 1),
        (Usage(10, cached_tokens=10), Price(1_000_000, 1000), 10),
        (Usage(0, 10, withheld_tokens=4), Price(output_micro_usd_per_1k=1000), 6),
        (Usage(0, 10, reasoning_tokens=9), Price(output_micro_usd_per_1k=1000), 10),
        (USAGE, Price(500, 50, 1500), COST),
        (Usage(10**9, 10**9), Price(10**9, 10**9, 10**9), 2 * 10**15),
    ],
)
def test_the_one_rounding(usage: Usage, price: Price, cost: int):
    """A row's cost is its exact sum, rounded half up to the micro-dollar, once."""
    assert cost_micro_usd(usage, price) == cost


@pytest.mark.parametrize("usage", [Usage(5, cached_tokens=6), Usage(0, 5, withheld_tokens=6)])
def test_a_cost_is_never_negative(usage: Usage):
    """Parts that an engine counts larger than their whole do not make a credit."""
    assert cost_micro_usd(usage, Price(1000, 0, 1000)) == 0


def test_a_reservation_is_open(c: sqlite3.Connection):
    """A reserved row has its prompt's tokens and day, costs nothing, and is in no sum."""
    seq = reserved(c, request_id="chatcmpl-1", prompt_tokens=7)
    assert [(r.seq, r.id, r.usage) for r in unsettled_requests(c)] == [(seq, "chatcmpl-1", Usage(7))]
    assert row(c, seq, "state", "day", "cost_micro_usd", "outcome") == ("reserved", 20261120, 0, None)
    assert days(c) == []


def test_an_id_is_reserved_once(c: sqlite3.Connection):
    """The same request is never two rows."""
    reserved(c, request_id="chatcmpl-1")
    with pytest.raises(sqlite3.IntegrityError):
        reserved(c, request_id="chatcmpl-1")


def test_a_checkpoint_is_what_a_dead_process_leaves(c: sqlite3.Connection):
    """The counts of the last checkpoint are those of the open row."""
    seq = reserved(c)
    checkpoint(c, seq, Usage(10, 5))
    checkpoint(c, seq, USAGE)
    assert [r.usage for r in unsettled_requests(c)] == [USAGE]
    assert days(c) == []


def test_settling_bills_the_row_and_its_day(c: sqlite3.Connection):
    """Counts, cost and outcome are in the row, and once in the sums of its day."""
    seq = reserved(c)
    assert settle(c, Settlement(seq, USAGE, "stop", at("2026-11-20T00:01")))
    assert row(c, seq, "state", "completion_tokens", "cost_micro_usd", "outcome", "reconciled") == (
        "settled",
        20,
        COST,
        "stop",
        0,
    )
    assert days(c) == [(20261120, 1, 20, COST)]
    assert unsettled_requests(c) == []


def test_settled_twice_is_billed_once(c: sqlite3.Connection):
    """A second settlement changes nothing, whoever comes with it and whatever it says."""
    seq = reserved(c)
    assert settle(c, Settlement(seq, USAGE, "stop", 1))
    before = row(c, seq, "*"), days(c)
    assert not settle(c, Settlement(seq, Usage(10, 99), "interrupted", 2, reconciled=True))
    checkpoint(c, seq, Usage(10, 99))
    assert (row(c, seq, "*"), days(c)) == before


def test_terms_at_hand_bill_as_those_of_the_row(c: sqlite3.Connection):
    """Whoever still has the reservation saves a look at the row; nothing else differs."""
    settled(c, USAGE)
    reservation = Reservation(
        "chatcmpl-x", "local", "llama", at("2026-11-20"), 100, 10, Price(500, 50, 1500), b"{}"
    )
    seq = reserve(c, reservation, None)
    settlement = Settlement(seq, USAGE, "stop", at("2026-11-21"), terms=reservation.terms)
    assert settle(c, settlement)
    assert not settle(c, settlement)
    assert not settle(c, Settlement(seq + 1, USAGE, "stop", at("2026-11-21"), terms=reservation.terms))
    assert days(c) == [(20261120, 2, 40, 2 * COST)]
    assert row(c, seq, "state", "cost_micro_usd") == ("settled", COST)


def test_what_was_never_reserved_is_not_settled(c: sqlite3.Connection):
    """An unknown row is no error and makes no sum."""
    assert not settle(c, Settlement(7, USAGE, "stop", 1))
    assert days(c) == []


def test_a_reconciled_row_says_so(c: sqlite3.Connection):
    """What was settled at its checkpoint can be told from what ended by itself."""
    seq = reserved(c)
    assert settle(c, Settlement(seq, USAGE, "interrupted", 1, reconciled=True))
    assert row(c, seq, "reconciled", "outcome") == (1, "interrupted")


def test_a_clock_that_steps_back_moves_no_row(c: sqlite3.Connection):
    """A row settled before it began, by the clock, stays in its day and ends when it began."""
    seq = reserved(c, created_at_us=at("2026-11-20"))
    assert settle(c, Settlement(seq, USAGE, "stop", at("2026-11-18")))
    assert row(c, seq, "settled_at_us") == (at("2026-11-20"),)
    settled(c, USAGE, created_at_us=at("2026-11-19"))
    assert [day for day, *_ in days(c)] == [20261119, 20261120]


def test_a_row_is_of_the_day_it_began(c: sqlite3.Connection):
    """A request over midnight is in the sums of the day on which it was reserved."""
    seq = reserved(c, created_at_us=at("2026-12-01") - 1)
    assert settle(c, Settlement(seq, USAGE, "stop", at("2026-12-01T00:05")))
    assert days(c) == [(20261130, 1, 20, COST)]


def test_the_price_of_the_reservation_counts(c: sqlite3.Connection):
    """A row is billed at the price stored with it."""
    cheap = settled(c, Usage(1000), price=Price(1))
    dear = settled(c, Usage(1000), price=Price(1_000_000))
    assert row(c, cheap, "cost_micro_usd") + row(c, dear, "cost_micro_usd") == (1, 1_000_000)


@pytest.mark.parametrize(
    ("at_us", "day"),
    [
        (0, 19700101),
        (at("2024-02-29"), 20240229),
        (at("2026-11-21") - 1, 20261120),
        (at("2026-11-21"), 20261121),
    ],
)
def test_days_are_utc(at_us: int, day: int):
    """A day begins at midnight UTC, wherever the server is."""
    assert day_of(at_us) == day


def billed(seq: int, usage: Usage = USAGE, finish: str = "stop", **fields: object) -> Settlement:
    """A settlement of that row."""
    return Settlement(seq, usage, finish, at("2026-11-20"), **fields)


def test_request_that_was_never_reserved_is_not_settled(c: sqlite3.Connection):
    """Nothing is added to any day."""
    assert not settle(c, billed(99))
    assert days(c) == []
    assert completion_tokens_of(c, 99) == 0


def test_end_of_a_request_is_done_once_with_its_settlement(c: sqlite3.Connection):
    """A second settlement changes nothing, and tells the tokens that the row has."""
    seq, ended = reserved(c), []
    unit = SettleUnit(billed(seq), lambda _c: ended.append(seq))
    assert unit(c) == 20
    assert SettleUnit(billed(seq, Usage(1, 1)), lambda _c: ended.append(seq))(c) == 20
    assert (ended, days(c)) == ([seq], [(20261120, 1, 20, COST)])


def test_settlement_without_an_end_of_its_own_settles(c: sqlite3.Connection):
    """Alone, and among several."""
    first, second = reserved(c), reserved(c)
    assert SettleUnit(billed(first))(c) == 20
    assert SettleUnit.run_many(c, [SettleUnit(billed(second))]) == [20]
    assert days(c) == [(20261120, 2, 40, 2 * COST)]


def test_several_settle_at_once_as_each_would(c: sqlite3.Connection):
    """With their terms or without; each has its end, in order."""
    seqs, ended = [reserved(c) for _ in range(3)], []
    terms = BillingTerms(20261120, "llama", "local", Price(500, 50, 1500))
    units = [
        SettleUnit(
            billed(seq, terms=terms if seq == seqs[0] else None), lambda _c, seq=seq: ended.append(seq)
        )
        for seq in seqs
    ]
    assert SettleUnit.run_many(c, units) == [20, 20, 20]
    assert (ended, days(c)) == (seqs, [(20261120, 3, 60, 3 * COST)])


def test_several_of_which_one_was_settled_are_refused_together(c: sqlite3.Connection):
    """So that each is then tried alone."""
    done, left = settled(c, USAGE), reserved(c)
    with pytest.raises(AlreadySettled):
        SettleUnit.run_many(c, [SettleUnit(billed(done)), SettleUnit(billed(left))])


def test_several_of_which_one_was_never_reserved_are_refused_together(c: sqlite3.Connection):
    """Its terms are not to be had."""
    with pytest.raises(AlreadySettled):
        SettleUnit.run_many(c, [SettleUnit(billed(reserved(c))), SettleUnit(billed(99))])


def test_days_of_a_batch_are_written_once_at_its_end():
    """However many requests settle in it; the days of two owners are kept apart."""
    written: list[str] = []
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as connection:
        migrate(connection, MIGRATIONS)
        seqs = [reserved(connection, owner=owner) for owner in ("ann", "ann", "bob")]
        connection.set_trace_callback(written.append)
        outcomes = commit_together(connection, [SettleUnit(billed(seq)) for seq in seqs])
        connection.set_trace_callback(None)
        assert outcomes == [20, 20, 20]
        assert days(connection) == [(20261120, 2, 40, 2 * COST), (20261120, 1, 20, COST)]
    assert len([sql for sql in written if sql.startswith("INSERT INTO usage_daily")]) == 2
