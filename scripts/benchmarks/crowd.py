"""Clients of a node, in a closed loop (the next request after the answer) or an open one (at random times).

A client that *obeys* sends a refused request again after exactly `Retry-After` seconds, unless
`x-should-retry` is false. A client that *gives up* leaves at the first refusal.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from scripts.benchmarks.asking import Asker, Attempt

MOST_ATTEMPTS = 6
UNTOLD_S = 1.0
"""Seconds that a closed-loop client waits after a refusal without `Retry-After`."""
NextChat = Callable[[int], bytes]


@dataclass(slots=True)
class ClientRequest:
    """One request of one client, and every attempt at it that has ended."""

    obeys: bool
    attempts: list[Attempt] = field(default_factory=list)


class Crowd:
    """All clients of one server, and all their requests."""

    def __init__(
        self,
        asker: Asker,
        next_chat: NextChat,
        rng: random.Random,
        on_ended: Callable[[Attempt], None] = lambda _attempt: None,
    ) -> None:
        self._asker = asker
        self._next_chat = next_chat
        self._rng = rng
        self._on_ended = on_ended
        self._tasks: set[asyncio.Task[None]] = set()
        self.requests: list[ClientRequest] = []

    def spawn(self, client: Coroutine[Any, Any, None]) -> None:
        """Run a client beside the others."""
        task = asyncio.get_running_loop().create_task(client)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    async def leave(self) -> None:
        """End every client where it is."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def all_served(self) -> None:
        """Wait until every client has its answer, or was refused."""
        await asyncio.gather(*self._tasks)

    async def in_turn(self, key: int, at_most_s: float = math.inf) -> None:
        """A closed-loop client, without end. After a refusal it waits `Retry-After`, `at_most_s` at most."""
        while True:
            request = await self.once(key, obeys=False)
            last = request.attempts[-1]
            if last.status != 200:
                await asyncio.sleep(min(last.retry_after_s or UNTOLD_S, at_most_s))

    async def want(self, key: int, *, obeys: bool) -> None:
        """A client that sends one request."""
        await self.once(key, obeys=obeys)

    async def once(self, key: int, *, obeys: bool) -> ClientRequest:
        """Send one request, with its retries, and return it."""
        request = ClientRequest(obeys)
        self.requests.append(request)
        body = self._next_chat(key)
        while True:
            attempt = await self._asker.ask(key, body)
            request.attempts.append(attempt)
            self._on_ended(attempt)
            comes_back = obeys and attempt.status in (429, 503) and attempt.should_retry
            if not comes_back or attempt.retry_after_s is None or len(request.attempts) == MOST_ATTEMPTS:
                return request
            await asyncio.sleep(attempt.retry_after_s)

    async def come(self, rate_per_s: float, seconds: float, obeying: float) -> None:
        """New clients at random times, `rate_per_s` a second. The share `obeying` of them obeys (0 to 1)."""
        rng = self._rng
        due_s = time.monotonic()
        end_s = due_s + seconds
        while due_s < end_s:
            await asyncio.sleep(due_s - time.monotonic())
            key, obeys = rng.randrange(self._asker.num_keys), rng.random() < obeying
            self.spawn(self.want(key, obeys=obeys))
            due_s += rng.expovariate(rate_per_s)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            raise error


def attempts(requests: Sequence[ClientRequest]) -> list[Attempt]:
    """Every attempt that has ended."""
    return [attempt for request in requests for attempt in request.attempts]
