"""Log lines about requests without a valid key: a few in each window, the others as sums."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

from structlog.typing import FilteringBoundLogger

LINES = 10
"""Lines written of each `WINDOW_S`; enough to see what a client does wrong."""

WINDOW_S = 1.0


class ThrottledLog:
    """Writes the first lines of each window, then the number of further requests by error."""

    def __init__(self, log: FilteringBoundLogger) -> None:
        self._log = log
        self._written = 0
        self._left_out: Counter[str] = Counter()

    def info(self, event: str, *, error: str, **fields: Any) -> None:
        """Write a line, or count it."""
        if self._written == 0:
            asyncio.get_running_loop().call_later(WINDOW_S, self._end_window, event)
        self._written += 1
        if self._written <= LINES:
            self._log.info(event, error=error, **fields)
        else:
            self._left_out[error] += 1

    def _end_window(self, event: str) -> None:
        if self._left_out:
            self._log.warning(f"{event}_more", requests=self._left_out.total(), errors=dict(self._left_out))
        self._written = 0
        self._left_out.clear()
