"""Restarts with pauses that double: one helper for everything that is started again after its end."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import NoReturn


class Backoff:
    """Pauses in seconds: `first_s`, then each twice the last, `longest_s` at most."""

    def __init__(self, first_s: float, longest_s: float) -> None:
        self._first_s = first_s
        self._longest_s = longest_s
        self._next_s = first_s

    def next_s(self) -> float:
        """The seconds of the next pause."""
        pause_s = self._next_s
        self._next_s = min(2 * pause_s, self._longest_s)
        return pause_s

    def reset(self) -> None:
        """Begin again with the first pause."""
        self._next_s = self._first_s


async def restart_with_backoff(run: Callable[[], Awaitable[bool]], backoff: Backoff) -> NoReturn:
    """Await `run` again and again until cancelled, with a pause after each.

    `run` returns once what it started has ended. After True the pauses begin again with the first.
    """
    while True:
        if await run():
            backoff.reset()
        await asyncio.sleep(backoff.next_s())
