"""One generation of the scripted engine, as it waits for its next token."""

from __future__ import annotations

import asyncio

from app.errors import EngineFailed


class Run:
    """Sleeps until something wakes it; ends early when it is aborted, with an error when the engine dies."""

    __slots__ = ("_waiter", "aborted", "error")

    def __init__(self) -> None:
        self.aborted = False
        self.error: EngineFailed | None = None
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        """Let the generation go on, if it waits."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def woken(self) -> None:
        """Wait for `wake`; at once when aborted. Raises EngineFailed when the engine dies meanwhile."""
        if self.aborted:
            return
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter
        if self.error is not None:
            raise self.error

    def abort(self) -> None:
        """Have the generation end with finish reason `abort`."""
        self.aborted = True
        self.wake()

    def fail(self, message: str) -> None:
        """Have the generation end with EngineFailed."""
        self.error = EngineFailed(message)
        self.wake()
