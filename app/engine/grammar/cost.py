"""The cost of a grammar: one measure, for the walk ahead of a request and for the guard while it runs.

A token mask is computed in the scheduler's step, which all requests share. So its cost is counted in
CPU time, which a busy machine does not change, and a grammar has an allowance per token. What it
takes beyond is a debt; later tokens that cost less pay it back.
"""

from __future__ import annotations

from typing import NamedTuple

BURST_TOKENS = 50
"""The largest debt, in allowances. An honest schema with `maxLength` 1,000 takes 25 ms once (128,000
tokens of vocabulary), and 1.3 ms on average."""


GRAMMAR_ENDED = "grammar_too_slow: "
"""The beginning of the message of an abort that the guard in the scheduler sends."""


class GrammarBudget(NamedTuple):
    """The budget of a grammar: CPU seconds to compile and check, CPU milliseconds per token's mask."""

    check_s: float = 5.0
    mask_ms: float = 2.0


class CostMeter:
    """The cost of one grammar over one answer, in milliseconds of CPU time."""

    __slots__ = ("debt_ms", "mask_ms", "spent_ms", "tokens")

    def __init__(self, mask_ms: float) -> None:
        self.mask_ms = mask_ms
        self.debt_ms = 0.0
        self.spent_ms = 0.0
        self.tokens = 0

    def spend(self, cost_ms: float, allowed_ms: float | None = None) -> None:
        """Count what one token cost; `allowed_ms` is its allowance where that is not `mask_ms`."""
        self.tokens += 1
        self.spent_ms += cost_ms
        self.debt_ms = max(0.0, self.debt_ms + cost_ms - (self.mask_ms if allowed_ms is None else allowed_ms))

    def add(self, cost_ms: float) -> None:
        """Count more of the token that was counted last."""
        self.spent_ms += cost_ms
        self.debt_ms += cost_ms

    @property
    def exceeded(self) -> bool:
        """True if the debt is more than a grammar may have."""
        return self.debt_ms > BURST_TOKENS * self.mask_ms

    def in_words(self) -> str:
        """The cost and the budget, in words."""
        return (
            f"choosing its tokens took {self.spent_ms:,.0f} ms of the scheduler's time over"
            f" {self.tokens:,} tokens; a grammar may take {self.mask_ms:g} ms a token,"
            f" and {BURST_TOKENS * self.mask_ms:g} ms beyond it at once"
        )
