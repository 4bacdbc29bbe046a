"""The deltas of one generation, all its choices interleaved, as an async iterator.

The producer is SGLang's receive loop, the consumer one task. A future is made only when the consumer
has to wait: the cost per token is that of a deque.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable

from app.core import Delta
from app.errors import ServingError


class GenerationStream(AsyncIterator[Delta]):
    """Ends after the final delta of every choice, or raises what ended it."""

    __slots__ = ("_begin", "_error", "_on_end", "_open_choices", "_pending", "_waiter", "aborted")

    def __init__(
        self, choices: int, begin: Callable[[], Awaitable[None]], on_end: Callable[[], None]
    ) -> None:
        self._pending: deque[Delta] = deque()
        self._open_choices = choices
        self._waiter: asyncio.Future[None] | None = None
        self._error: ServingError | None = None
        self._begin: Callable[[], Awaitable[None]] | None = begin
        self._on_end = on_end
        self.aborted = False
        """Whether `abort` was called."""

    @property
    def failed(self) -> bool:
        """Whether it ended, or will once read, with an error."""
        return self._error is not None

    @property
    def begun(self) -> bool:
        """Whether the engine has been asked; it is when the first delta is."""
        return self._begin is None

    def abort(self) -> None:
        """Note that the request is aborted: its choices that were not sent yet are not."""
        self.aborted = True

    def put(self, delta: Delta) -> None:
        """Give the consumer a delta that is not a choice's last."""
        if self._error is None:
            self._pending.append(delta)
            if self._waiter is not None:
                self._wake()

    def put_final(self, delta: Delta) -> None:
        """Give the consumer a choice's last delta."""
        self.put(delta)
        self._open_choices -= 1
        if self._open_choices == 0:
            self._on_end()

    def fail(self, error: ServingError) -> None:
        """End the stream with `error`, after the deltas that came before it."""
        if self._error is None and self._open_choices:
            self._error = error
            self._on_end()
            if self._waiter is not None:
                self._wake()

    async def __anext__(self) -> Delta:
        if self._begin is not None:
            begin, self._begin = self._begin, None
            await begin()
        while not self._pending:
            if self._error is not None:
                raise self._error
            if not self._open_choices:
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return self._pending.popleft()

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
