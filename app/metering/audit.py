"""The ledger against the token ids handed over, request by request.

Both are sums of this process: completion tokens as their rows have them once they are settled,
which are the engine's own counts, and token ids counted by other code where the engine hands
them over (app.engine.sink). A request for which they differ raises a flag that stays until the restart.
What a dead process left open, and the next one settled, is no part of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from structlog.typing import FilteringBoundLogger


@dataclass(slots=True)
class AuditSums:
    """One model's settled requests.

    `handed_over_tokens` is `ledger_tokens` and `unread_tokens` together, unless requests differ;
    `drift_tokens` is by how much they do, either way.
    """

    ledger_tokens: int = 0
    handed_over_tokens: int = 0
    unread_tokens: int = 0
    differing_requests: int = 0
    drift_tokens: int = 0

    def add(self, completion_tokens: int, emitted_tokens: int, *, read_whole: bool) -> bool:
        """Add a settled request; returns whether its tokens differ from those handed over."""
        self.ledger_tokens += completion_tokens
        self.handed_over_tokens += emitted_tokens
        drift = completion_tokens - emitted_tokens
        if drift < 0 and not read_whole:
            self.unread_tokens -= drift
            return False
        self.differing_requests += drift != 0
        self.drift_tokens += abs(drift)
        return drift != 0


class LedgerAudit:
    """The tokens settled and the tokens handed over, for each model."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self.models: dict[str, AuditSums] = {}
        self.last_request_id: str | None = None
        """The newest request that differs."""
        self._log = log

    @property
    def differs(self) -> bool:
        """True if the two differed for any request since the start."""
        return self.last_request_id is not None

    def of(self, model: str) -> AuditSums:
        """A model's sums, all zero when it is new."""
        return self.models.setdefault(model, AuditSums())

    def compare(
        self,
        model: str,
        request_id: str,
        completion_tokens: int,
        emitted_tokens: int,
        *,
        read_whole: bool = True,
    ) -> None:
        """Count a request whose settlement is committed.

        A generation that was not read to its end (the engine failed, the server stopped) may have
        been handed more than was read and billed, and never less.
        """
        if self.of(model).add(completion_tokens, emitted_tokens, read_whole=read_whole):
            self.last_request_id = request_id
            self._log.warning(
                "ledger_differs",
                request_id=request_id,
                model=model,
                completion_tokens=completion_tokens,
                emitted_tokens=emitted_tokens,
                hint="the bill differs from the tokens handed over; see docs/metrics.md",
            )

    def detail(self) -> dict[str, Any]:
        """The flag and what raised it, over all models."""
        return {
            "differs": self.differs,
            "differing_requests": sum(sums.differing_requests for sums in self.models.values()),
            "drift_tokens": sum(sums.drift_tokens for sums in self.models.values()),
            "last_request_id": self.last_request_id,
        }
