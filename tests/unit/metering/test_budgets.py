"""What an owner has spent in a month: the ledger, and what runs."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from datetime import UTC, date, datetime
from pathlib import Path
from typing import Any

import pytest

from app.core import Key, KeyTerms, Usage
from app.errors import QuotaExceeded
from app.metering.budgets import Budgets
from app.metering.limits import Limiter
from app.store.database import Database
from app.store.ledger import Price
from tests.support.ledgers import at, settled

DOLLAR_A_TOKEN = Price(1_000_000_000, 1_000_000_000, 1_000_000_000)
NOVEMBER = 20211121


class Calendar:
    """A calendar that the test turns."""

    def __init__(self) -> None:
        self.today = date(2021, 11, 21)

    def __call__(self) -> date:
        return self.today


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[Database]:
    """A store in which ann spent 10 dollars in October, 5 and 7 in November, and bob 100."""
    database = Database(tmp_path)
    await database.open()
    for day, owner, tokens in (
        ("2021-10-31", "ann", 10),
        ("2021-11-01", "ann", 5),
        ("2021-11-21", "ann", 7),
        ("2021-11-21", "bob", 100),
    ):
        fields: dict[str, Any] = {"created_at_us": at(day), "owner": owner, "price": DOLLAR_A_TOKEN}
        await database.write(lambda c, t=tokens, f=fields: settled(c, Usage(t, 0), **f))
    yield database
    await database.aclose()


def key(dollars: int | None, owner: str = "ann") -> Key:
    """A key with that budget."""
    budget = None if dollars is None else dollars * 1_000_000
    return Key(f"tr-{owner}", owner, KeyTerms("x", budget_micro_usd=budget), 0)


async def test_the_months_cost_of_the_owner_is_what_counts(database: Database) -> None:
    """12 dollars in this month: not last month's, not another owner's."""
    budgets = Budgets(database, Limiter(), Calendar())
    assert await budgets.check(key(13), "r") is not None
    with pytest.raises(QuotaExceeded, match=r"\$12 is used up: \$12 spent"):
        await budgets.check(key(12), "r")


async def test_keys_without_a_budget_are_not_looked_at(database: Database) -> None:
    """Nothing is read or kept."""
    budgets = Budgets(database, Limiter(), Calendar())
    assert await budgets.check(None, "r") is None
    assert await budgets.check(key(None), "r") is None
    budgets.add_bill("ann", NOVEMBER, "r", 5)
    assert not budgets._owners


async def test_what_runs_counts_once(database: Database) -> None:
    """A running answer's cost is replaced by its settlement's; another's settlement is added."""
    budgets = Budgets(database, Limiter(), Calendar())
    allowance = await budgets.check(key(20), "one")
    assert allowance is not None
    assert not allowance.note_usage(Usage(2, 5), DOLLAR_A_TOKEN)
    assert allowance.note_usage(Usage(2, 6), DOLLAR_A_TOKEN)
    with pytest.raises(QuotaExceeded):
        await budgets.check(key(20), "two")
    budgets.add_bill("ann", NOVEMBER, "one", 6_000_000)
    assert await budgets.check(key(20), "two") is not None
    budgets.add_bill("ann", NOVEMBER, "of a key without a budget", 2_000_000)
    with pytest.raises(QuotaExceeded):
        await budgets.check(key(20), "two")


async def test_a_new_month_begins_at_its_own_cost(database: Database) -> None:
    """What settles late for a day of the old month is no part of the new one's."""
    calendar = Calendar()
    budgets = Budgets(database, Limiter(), calendar)
    with pytest.raises(QuotaExceeded):
        await budgets.check(key(12), "r")
    calendar.today = date(2021, 12, 1)
    assert await budgets.check(key(12), "r") is not None
    budgets.add_bill("ann", NOVEMBER, "late", 50_000_000)
    assert await budgets.check(key(12), "r") is not None


async def test_what_settles_around_the_first_look_counts_once(database: Database) -> None:
    """In the same batch of the writer: before it it is in the sum, after it it is told."""
    budgets = Budgets(database, Limiter(), Calendar())

    def settle(request_id: str) -> asyncio.Future[Any]:
        fields: dict[str, Any] = {"created_at_us": at("2021-11-21"), "owner": "ann", "price": DOLLAR_A_TOKEN}
        done = database.submit(lambda c: settled(c, Usage(3, 0), **fields) and None)
        done.add_done_callback(lambda _: budgets.add_bill("ann", NOVEMBER, request_id, 3_000_000))
        return done

    blocked = threading.Event()
    database.submit(lambda _c: blocked.wait(5))
    await asyncio.sleep(0)
    before = [settle(f"before-{n}") for n in range(4)]
    look = asyncio.create_task(budgets.check(key(1000), "r"))
    await asyncio.sleep(0)
    after = [settle(f"after-{n}") for n in range(4)]
    blocked.set()
    await asyncio.gather(*before, look, *after)
    assert budgets._owners["ann"].micro_usd == (12 + 8 * 3) * 1_000_000


async def test_notice_of_an_answer_that_reached_the_budget_names_it(database: Database) -> None:
    """With the code of a refusal for the same reason."""
    allowance = await Budgets(database, Limiter(), Calendar()).check(key(20), "r")
    assert allowance is not None
    notice = allowance.as_notice()
    assert notice["code"] == "insufficient_quota"
    assert "budget of $20 is used up" in notice["message"]


async def test_two_first_looks_at_once_share_one_sum(database: Database) -> None:
    """What the first has noted as running is not lost to the second, which read the ledger too."""
    budgets = Budgets(database, Limiter(), Calendar())
    first, second = await asyncio.gather(budgets.check(key(20), "one"), budgets.check(key(20), "two"))
    assert first is not None
    assert second is not None
    assert not first.note_usage(Usage(5, 0), DOLLAR_A_TOKEN)
    assert second.note_usage(Usage(3, 0), DOLLAR_A_TOKEN)


async def test_month_is_that_of_utc_where_nothing_else_is_said(database: Database) -> None:
    """The owner's spending is that of today's month."""
    budgets = Budgets(database, Limiter())
    await budgets.check(key(20), "r")
    assert budgets._owners["ann"].month == datetime.now(UTC).year * 100 + datetime.now(UTC).month
