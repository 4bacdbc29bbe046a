"""The lease of an answer that goes on: it counts the tokens that are yet to be made, and not its prompt."""

from __future__ import annotations

from collections.abc import Mapping

from app.core import Counts, Prompt
from app.metering.limits import Lease


class ContinuedLease(Lease):
    """A lease that is not charged for what was made before. `counts` are those of then, by choice."""

    def __init__(self, lease: Lease, counts: Mapping[int, Counts]) -> None:
        self._lease = lease
        self._counts = counts
        self.metered = lease.metered

    def correct(self, prompt: Prompt) -> None:
        """See Lease. The prompt was charged before, and nothing is reserved."""

    def on_delta(self, choice: int, completion_tokens: int) -> bool:
        """See Lease."""
        return self._lease.on_delta(choice, self._new(choice, completion_tokens))

    def as_notice(self) -> dict[str, str]:
        """See Lease."""
        return self._lease.as_notice()

    def settle(self, counts: Mapping[int, Counts]) -> None:
        """See Lease."""
        new = {choice: self._new(choice, made.completion_tokens) for choice, made in counts.items()}
        self._lease.settle({choice: Counts(completion_tokens=tokens) for choice, tokens in new.items()})

    def withdraw(self) -> None:
        """See Lease."""
        self.settle({})

    def _new(self, choice: int, completion_tokens: int) -> int:
        return max(completion_tokens - self._counts.get(choice, Counts()).completion_tokens, 0)
