"""What an owner may spend in a UTC month, by the ledger."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime

from app.errors import QuotaExceeded
from app.metering.limiter import Limiter
from app.metering.period import number_of
from app.store.database import Database
from app.store.keys import Key
from app.store.usage import usage

_MICRO = 1_000_000


def _today() -> date:
    return datetime.now(UTC).date()


class Budgets:
    """Looks into the ledger before a request of a key that has a budget; the others pay nothing."""

    def __init__(self, database: Database, limiter: Limiter, today: Callable[[], date] = _today) -> None:
        self._database = database
        self._limiter = limiter
        self._today = today

    async def check(self, key: Key) -> None:
        """Raise QuotaExceeded once the month's settled cost has reached the key's budget.

        The cost is that of the key's owner, whichever of their keys they used.
        """
        budget = key.terms.budget_micro_usd
        if budget is None:
            return
        spent = await self.spent_micro_usd(key.owner)
        if spent < budget:
            return
        self._limiter.count_refusal(key, "budget")
        raise QuotaExceeded(
            f"This month's budget of ${budget / _MICRO:,.6g} is used up: ${spent / _MICRO:,.6g} spent."
            " It begins anew with the next UTC month; an administrator can raise it."
        )

    async def spent_micro_usd(self, owner: str) -> int:
        """What the owner's settled requests of this month cost."""
        today = self._today()
        days = number_of(today.replace(day=1)), number_of(today)
        [group] = await self._database.read(lambda c: usage(c, *days, (), owner))
        return group.sums.cost_micro_usd
