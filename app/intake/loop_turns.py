"""How many requests go on in one turn of the event loop, so that a thousand at once do not hold it up.

A request that begins takes one to two milliseconds before it waits for anything, a long one more. A thousand
that come together would take them all in the same turn: no token and no `/healthz` would go out for seconds.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque

MOST, LEAST = 8, 4
"""Requests that go on in one turn. The least is so many that they get on beside a thousand streams."""
TURN_S = 0.04
"""Seconds that a turn takes from which fewer go on in the next ones: twice what eight requests take."""


class LoopTurns:
    """Lets a few requests go on in each turn of the loop; owners take turns."""

    def __init__(self) -> None:
        self._num_begun = 0
        """Requests that went on in this turn, or were told to in the next."""
        self._most = MOST
        self._turned_s = 0.0
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting requests by owner, in the order in which they go on."""

    async def take(self, owner: str) -> None:
        """Go on at once, or in one of the next turns."""
        if self._num_begun < self._most and not self._waiting:
            if not self._num_begun:
                self._turned_s = time.monotonic()
            self._begin(asyncio.get_running_loop())
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        await turn

    def _begin(self, loop: asyncio.AbstractEventLoop) -> None:
        if not self._num_begun:
            loop.call_soon(self._next_turn, loop)
        self._num_begun += 1

    def _next_turn(self, loop: asyncio.AbstractEventLoop) -> None:
        self._num_begun = 0
        now_s = time.monotonic()
        if self._waiting and now_s - self._turned_s > TURN_S:
            self._most = max(self._most // 2, LEAST)
        else:
            self._most = min(self._most + 1, MOST)
        self._turned_s = now_s
        while self._waiting and self._num_begun < self._most:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind the others
            if not turn.done():  # its client may have left
                self._begin(loop)
                turn.set_result(None)
