"""The client of one HTTP request, whose body was read: watches for its leaving.

`StreamRegistry.leave` (app.stream.registry) decides whether a generation ends then, and after which grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request

from app.intake.scope import CONNECTION

T = TypeVar("T")


class Client:
    """Watches for the client of a request to leave."""

    def __init__(self, request: Request) -> None:
        self._connection = request.scope["extensions"][CONNECTION]

    @property
    def gone(self) -> bool:
        """True if the client has left."""
        left: bool = self._connection.left
        return left

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves, or now if it has left. Replaces an earlier callback."""
        self._connection.on_left(callback)

    async def until_disconnect(self, work: Coroutine[Any, Any, T], name: str) -> T:
        """The result of `work`, a task of that name, cancelled when the client leaves.

        Raises ClientDisconnect.
        """
        task = asyncio.create_task(work, name=name)
        self.on_gone(lambda: _cancel(task))
        try:
            return await task
        except asyncio.CancelledError:
            if self.gone:
                raise ClientDisconnect from None
            raise
        finally:
            task.cancel()
            self.stop()

    def stop(self) -> None:
        """Stop watching, and drop the callback, so that no cycle is left to the garbage collector."""
        self._connection.on_left(None)


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
