"""What was checked and what did not hold."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Shortfall:
    """How much a client had received that a request killed in flight is not billed for."""

    tokens: int = 0
    seconds: float = 0.0


@dataclass
class Findings:
    """Counts of checks by name, violations in full, and the worst that was still right."""

    checks: dict[str, int] = field(default_factory=dict)
    violations: list[dict[str, Any]] = field(default_factory=list)
    ends: dict[str, int] = field(default_factory=dict)
    shortfall: Shortfall = field(default_factory=Shortfall)
    ahead_tokens: int = 0
    """Most tokens billed that a client connected to the end had not received."""
    kill: int = 0
    step: str = "kill"
    """What `kill` counts."""

    @property
    def num_checks(self) -> int:
        return sum(self.checks.values())

    def check(self, holds: object, what: str, **facts: Any) -> bool:
        """Count a check; note a violation, and print it, when it does not hold."""
        self.checks[what] = self.checks.get(what, 0) + 1
        if not holds:
            self.violations.append({self.step: self.kill, "what": what, **facts})
            print(
                f"VIOLATION before {self.step} {self.kill}: not so: {what}: {facts}",
                file=sys.stderr,
                flush=True,
            )
        return bool(holds)

    def ended(self, how: str) -> None:
        """Count the end of a request, as the ledger has it."""
        self.ends[how] = self.ends.get(how, 0) + 1

    def short(self, tokens: int, seconds: float) -> None:
        """Note a shortfall; the worst is kept."""
        self.shortfall.tokens = max(self.shortfall.tokens, tokens)
        self.shortfall.seconds = max(self.shortfall.seconds, seconds)
