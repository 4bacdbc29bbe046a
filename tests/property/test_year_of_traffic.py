"""The books balance: whatever comes, each request is billed once, and every sum is the sum of its rows."""

from __future__ import annotations

import random
import sqlite3
from datetime import UTC, date, datetime, timedelta
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from app.core import Usage
from app.metering.pricing import PriceTable
from app.store.ledger import Price, Settlement, cost_micro_usd, settle, unsettled_requests
from app.store.usage import differences, usage
from tests.support.ledgers import checkpoint, empty_store, reserved

FIRST = datetime(2026, 1, 1, tzinfo=UTC)
MODELS = ("llama", "qwen", "unlisted")
OWNERS = ("ann", "bob", "cleo", "dan")
DAY_US = 86_400 * 1_000_000
REQUESTS_A_DAY = 40


def random_usage(rng: random.Random) -> Usage:
    """Counts as an engine may state them."""
    prompt, completion = rng.randint(0, 9000), rng.randint(0, 3000)
    return Usage(
        prompt,
        completion,
        rng.randint(0, prompt),
        rng.randint(0, completion),
        rng.choice((0, rng.randint(0, completion))),
    )


def random_prices(rng: random.Random) -> PriceTable:
    """Prices that change some times in the year, down to the micro-dollar; one model has none of its own."""
    days = {(model, 0) for model in MODELS[:2]} | {
        (rng.choice((*MODELS[:2], "*")), rng.randint(0, 364)) for _ in range(12)
    }
    return PriceTable.parse(
        {
            "model": model,
            "from": str(date(2026, 1, 1) + timedelta(day)),
            "input": f"{rng.randint(0, 5000) / 1e6:.6f}",
            "cached_input": f"{rng.randint(0, 500) / 1e6:.6f}",
            "output": f"{rng.randint(0, 15000) / 1e6:.6f}",
        }
        for model, day in sorted(days)
    )


def by_hand(u: Usage, price: Price) -> Fraction:
    """What a request costs in micro-dollars, before it is rounded."""
    return Fraction(
        (u.prompt_tokens - u.cached_tokens) * price.input_micro_usd_per_1k
        + u.cached_tokens * price.cached_micro_usd_per_1k
        + (u.completion_tokens - u.withheld_tokens) * price.output_micro_usd_per_1k,
        1000,
    )


def a_year(c: sqlite3.Connection, rng: random.Random) -> tuple[int, Fraction]:
    """A year of traffic through the ledger, some of it still open; what it cost, rounded and exactly."""
    prices = random_prices(rng)
    billed, exact = 0, Fraction(0)
    start_us = int(FIRST.timestamp()) * 1_000_000
    for day in range(365):
        for _ in range(rng.randint(0, 2 * REQUESTS_A_DAY)):
            at_us = start_us + day * DAY_US + rng.randrange(DAY_US)
            model = rng.choice(MODELS)
            price, used = prices.price_of(model, at_us), random_usage(rng)
            of_key = {"owner": rng.choice(OWNERS), "key_id": rng.choice(("tr-1", "tr-2", "none"))}
            labels = {"project": rng.choice(("a", "b"))} if rng.random() < 0.5 else {}
            seq = reserved(c, **of_key, metadata=labels, model=model, created_at_us=at_us, price=price)
            if rng.random() < 0.02:
                continue
            assert settle(c, Settlement(seq, used, "stop", at_us + rng.randrange(DAY_US)))
            billed += cost_micro_usd(used, price)
            exact += by_hand(used, price)
    return billed, exact


def months() -> list[tuple[int, int]]:
    """The first and last day of each month of the year."""
    return [(20260000 + month * 100 + 1, 20260000 + month * 100 + 31) for month in range(1, 13)]


@pytest.mark.parametrize("seed", range(3))
def test_a_year_balances_to_the_micro_dollar(seed: int):
    """The sum of the rows, of the daily sums, and of each owner's monthly invoices is one number."""
    c = empty_store()
    c.execute("BEGIN")
    billed, exact = a_year(c, random.Random(seed))
    c.execute("COMMIT")
    [(num_rows, rows)] = c.execute(
        "SELECT count(*), sum(cost_micro_usd) FROM requests WHERE state = 'settled'"
    )
    [(daily,)] = c.execute("SELECT sum(cost_micro_usd) FROM usage_daily")
    invoices = [group.sums for month in months() for group in usage(c, *month, ("owner",))]
    assert len(invoices) == len(OWNERS) * 12
    assert rows == daily == sum(invoice.cost_micro_usd for invoice in invoices) == billed > 0
    assert num_rows == sum(invoice.requests for invoice in invoices)
    assert abs(billed - exact) <= Fraction(num_rows, 2), "each row is off by half a micro-dollar at most"
    assert differences(c) == []


@pytest.mark.parametrize("seed", range(3))
def test_every_way_to_group_a_year_has_one_sum(seed: int):
    """Grouped by day, model, key, metadata or any of them together, the parts add up to the whole."""
    c = empty_store()
    c.execute("BEGIN")
    a_year(c, random.Random(seed))
    c.execute("COMMIT")
    [whole] = usage(c, 20260101, 20261231, ())
    for group_by in (
        ("day",),
        ("model",),
        ("key",),
        ("metadata.project",),
        ("day", "model", "key", "metadata.project"),
    ):
        groups = usage(c, 20260101, 20261231, group_by)
        assert tuple(map(sum, zip(*(g.sums for g in groups), strict=True))) == whole.sums


counts = st.builds(Usage, *[st.integers(0, 10_000)] * 5)
steps = st.lists(
    st.one_of(
        st.tuples(st.just("checkpoint"), st.integers(0, 3), counts),
        st.tuples(st.just("settle"), st.integers(0, 3), counts),
        st.tuples(st.just("reconcile"), st.just(0), st.just(Usage())),
        st.tuples(st.just("undone"), st.integers(0, 3), counts),
    ),
    max_size=30,
)


@settings(deadline=None)
@given(steps)
def test_any_order_of_verbs_bills_once(sequence: list[tuple[str, int, Usage]]):
    """Verbs in any order, and some rolled back: the first to settle bills, and none after it."""
    c = empty_store()
    seqs = [reserved(c) for _ in range(4)]
    latest = {seq: Usage(10) for seq in seqs}
    final: dict[int, Usage] = {}
    for verb, which, used in sequence:
        seq = seqs[which]
        if verb == "checkpoint":
            checkpoint(c, seq, used)
            latest[seq] = used
        elif verb == "settle":
            assert settle(c, Settlement(seq, used, "stop", 1)) == (seq not in final)
            final.setdefault(seq, used)
        elif verb == "undone":
            c.execute("BEGIN")
            assert settle(c, Settlement(seq, used, "stop", 1)) == (seq not in final)
            c.execute("ROLLBACK")
        else:
            for left in unsettled_requests(c):
                assert left.usage == latest[left.seq]
                assert settle(c, Settlement(left.seq, left.usage, "interrupted", 1, reconciled=True))
                final[left.seq] = left.usage
    assert {left.seq for left in unsettled_requests(c)} == set(seqs) - set(final)
    [whole] = usage(c, 20260101, 20261231, ())
    assert whole.sums.requests == len(final)
    price = Price(500, 50, 1500)
    assert whole.sums.cost_micro_usd == sum(cost_micro_usd(used, price) for used in final.values())
    assert differences(c) == []


@given(counts, st.builds(Price, *[st.integers(0, 10**9)] * 3))
def test_rounding_is_half_up_of_the_whole(used: Usage, price: Price):
    """Whatever the counts, the cost is the whole number nearest to the exact sum, the upper of two."""
    used = used._replace(
        cached_tokens=min(used.cached_tokens, used.prompt_tokens),
        withheld_tokens=min(used.withheld_tokens, used.completion_tokens),
    )
    exact = by_hand(used, price)
    assert Fraction(-1, 2) < cost_micro_usd(used, price) - exact <= Fraction(1, 2)
