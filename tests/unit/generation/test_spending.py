"""An answer ends at the token at which its key's tokens, or its month's money, are used up."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from app.core import Counts, Delta, Usage
from app.generation.journal_entry import JournalEntry
from app.generation.spending import SpendingLimits
from app.metering.budgets import Allowance
from app.metering.limits import UNLIMITED, Lease
from app.store.ledger import Price


class LeaseOf(Lease):
    """A lease of so many tokens."""

    metered = True

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def on_delta(self, choice: int, completion_tokens: int) -> bool:
        """See Lease."""
        del choice
        return completion_tokens >= self._tokens


class AllowanceOf:
    """An allowance of so many tokens."""

    def __init__(self, tokens: int) -> None:
        self._tokens = tokens

    def note_usage(self, usage: Usage, _price: Price) -> bool:
        """See Allowance."""
        return usage.completion_tokens >= self._tokens


def delta(tokens: int) -> Delta:
    """A delta with that many tokens made so far."""
    return Delta(0, "text", "word ", (1,), Counts(3, tokens))


def entry(tokens: int) -> JournalEntry:
    """An entry with that many tokens used."""
    fake: Any = SimpleNamespace(usage=lambda: Usage(3, tokens), price=Price())
    return cast("JournalEntry", fake)


def test_a_key_without_limits_reaches_none():
    """And nobody has to ask."""
    limits = SpendingLimits(UNLIMITED, None)
    assert not limits.metered
    assert not limits.budgeted
    assert limits.reached is None


def test_a_leases_last_token_is_the_answers():
    """By what the engine made, released or not."""
    lease = LeaseOf(5)
    limits = SpendingLimits(lease, None)
    limits.on_generated(delta(4))
    assert limits.reached is None
    limits.on_generated(delta(5))
    limits.on_generated(delta(6))
    assert limits.reached is lease


def test_a_budgets_last_token_is_the_answers():
    """By what was released; it is what the answer says, also where the tokens are used up, too."""
    allowance = cast("Allowance", AllowanceOf(5))
    limits = SpendingLimits(LeaseOf(5), allowance)
    assert not limits.on_released(entry(4))
    limits.on_generated(delta(5))
    assert limits.on_released(entry(5))
    assert limits.reached is allowance
