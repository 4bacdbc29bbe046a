"""What admission has done since the process began: plain numbers, for those who watch it."""

from __future__ import annotations

from collections import Counter

from app.core import TIERS, Tier
from app.errors import KeyOverloaded, Overloaded

CODES = (KeyOverloaded.default_code, Overloaded.default_code, "queue_timeout")


class AdmissionCounts:
    """Every label is there from the start, at zero. An engine that starts again does not end the counting."""

    def __init__(self) -> None:
        self.admitted: dict[Tier, int] = dict.fromkeys(TIERS, 0)
        self.refused: dict[Tier, Counter[str]] = {tier: Counter(dict.fromkeys(CODES, 0)) for tier in TIERS}
        """By code; what was refused for other reasons, as a client that left, is not here."""
        self.retry_slots = {"kept": 0, "missed": 0}
        self.unread_aborted = 0
        """Streams without a reader that ended so that others have room."""
