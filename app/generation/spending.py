"""Where a key's tokens a minute or its month's money are used up: the answer ends at that token."""

from __future__ import annotations

from app.core import Delta
from app.generation.journal_entry import JournalEntry
from app.metering.budgets import Allowance
from app.metering.limits import Lease


class SpendingLimits:
    """The limits that one request can reach while it is answered. `reached` is the first that it did."""

    def __init__(self, lease: Lease, allowance: Allowance | None) -> None:
        self.metered = lease.metered
        """Whether `on_generated` has to be called."""
        self.budgeted = allowance is not None
        """Whether `on_released` has to be called."""
        self._lease = lease
        self._allowance = allowance
        self.reached: Lease | Allowance | None = None

    def on_generated(self, delta: Delta) -> None:
        """Charge the key's tokens for what the engine has made of a choice."""
        if self._lease.on_delta(delta.choice, delta.counts.completion_tokens) and self.reached is None:
            self.reached = self._lease

    def on_released(self, entry: JournalEntry) -> bool:
        """Charge the budget for what is released by now; whether it is used up."""
        allowance = self._allowance
        if allowance is None or not allowance.note_usage(entry.usage(), entry.price):
            return False
        self.reached = allowance
        return True
