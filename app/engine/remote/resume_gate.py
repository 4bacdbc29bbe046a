"""A gate for choices that go on at another server: few at once, or the herd would end that one too."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

PLACES = 4
"""Choices that are read in at once. A request that kills servers takes at most so many with it."""
HOLD_S = 10.0
"""Seconds after which a choice without a token gives its place to the next."""


class ResumeGate:
    """Belongs to one event loop."""

    def __init__(self, places: int = PLACES, hold_s: float = HOLD_S) -> None:
        self._places = asyncio.Semaphore(places)
        self._hold_s = hold_s

    async def enter(self) -> Callable[[], None]:
        """Wait for a place; returns the function that gives it back, which may be called again."""
        await self._places.acquire()
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                timer.cancel()
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._hold_s, leave)
        return leave
