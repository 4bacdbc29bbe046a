"""Monthly budgets of owners (UTC): the ledger's settled cost, and the cost of answers in progress.

The ledger is read once an owner and month, by its writer: every settlement before that is in the
sum, every later one is added by `add_bill`. Owners without a budget are not kept.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, date, datetime

from app.core import Key, Usage
from app.errors import QuotaExceeded
from app.metering.limits import Limiter
from app.metering.pricing import usd
from app.metering.usage import number_of
from app.store.database import Database
from app.store.ledger import Price, cost_micro_usd
from app.store.usage import usage


def _today() -> date:
    return datetime.now(UTC).date()


class _Spending:
    """One owner's month, in micro-dollars."""

    __slots__ = ("_live", "micro_usd", "month")

    def __init__(self, month: int, settled_micro_usd: int) -> None:
        self.month = month
        self.micro_usd = settled_micro_usd
        """All of it, answers in progress too."""
        self._live: dict[str, int] = {}

    def update(self, request_id: str, micro_usd: int) -> None:
        """Note the cost of a running request so far."""
        self.micro_usd += micro_usd - self._live.get(request_id, 0)
        self._live[request_id] = micro_usd

    def close(self, request_id: str, micro_usd: int) -> None:
        """Note the final cost of a request, whether or not it was noted as running."""
        self.micro_usd += micro_usd - self._live.pop(request_id, 0)


class Allowance:
    """The money that one request of a key with a budget may spend."""

    def __init__(self, spending: _Spending, budget_micro_usd: int, request_id: str) -> None:
        self._spending = spending
        self._budget_micro_usd = budget_micro_usd
        self._request_id = request_id

    def note_usage(self, usage: Usage, price: Price) -> bool:
        """Note the usage of a running request; returns whether the budget is reached."""
        self._spending.update(self._request_id, cost_micro_usd(usage, price))
        return self._spending.micro_usd >= self._budget_micro_usd

    def as_notice(self) -> dict[str, str]:
        """The notice of a stream that reached the budget."""
        message = f"The answer ends here: this month's budget of ${usd(self._budget_micro_usd)} is used up."
        return {"code": QuotaExceeded.default_code, "message": message}


class Budgets:
    """All owners' spending, as far as they have keys with a budget; other keys pay nothing."""

    def __init__(self, database: Database, limiter: Limiter, today: Callable[[], date] = _today) -> None:
        self._database = database
        self._limiter = limiter
        self._today = today
        self._owners: dict[str, _Spending] = {}

    async def check(self, key: Key | None, request_id: str) -> Allowance | None:
        """The allowance of a new request; None without a budget. Raises QuotaExceeded, StorageUnavailable.

        The spending is that of the key's owner, whichever of their keys they used.
        """
        budget = None if key is None else key.terms.budget_micro_usd
        if key is None or budget is None:
            return None
        spending = await self._spending(key.owner)
        if spending.micro_usd < budget:
            return Allowance(spending, budget, request_id)
        self._limiter.count_refusal(key, "budget")
        raise QuotaExceeded(
            f"This month's budget of ${usd(budget)} is used up: ${usd(spending.micro_usd)} spent."
            " It is renewed with the next UTC month; an administrator can raise it."
        )

    async def resume(self, key: Key | None, request_id: str) -> Allowance | None:
        """The allowance of a request that was admitted before; None without a budget.

        Where the budget is used up, the answer ends with the next token. Raises StorageUnavailable.
        """
        budget = None if key is None else key.terms.budget_micro_usd
        if key is None or budget is None:
            return None
        return Allowance(await self._spending(key.owner), budget, request_id)

    async def _spending(self, owner: str) -> _Spending:
        today = self._today()
        month = number_of(today) // 100
        spending = self._owners.get(owner)
        if spending is not None and spending.month == month:
            return spending
        days = number_of(today.replace(day=1)), number_of(today.replace(day=1)) + 30
        [month_usage] = await self._database.write(lambda c: usage(c, *days, (), owner=owner))
        spending = self._owners.get(owner)
        if spending is None or spending.month != month:  # not loaded by another request meanwhile
            spending = self._owners[owner] = _Spending(month, month_usage.sums.cost_micro_usd)
        return spending

    def add_bill(self, owner: str, day: int, request_id: str, micro_usd: int) -> None:
        """A settlement is committed; called in the order of their commits."""
        spending = self._owners.get(owner)
        if spending is not None and spending.month == day // 100:
            spending.close(request_id, micro_usd)
