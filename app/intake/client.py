"""The client of one HTTP request, whose body was read: watches for its leaving.

`StreamRegistry.leave` (app.stream.registry) decides whether a generation ends then, and after which grace.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


class Client:
    """Watches for the client of a request to leave. Nothing else receives of the request meanwhile."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._callback: Callable[[], None] | None = None
        self.gone = False

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves, or now if it has left. Replaces an earlier callback."""
        self._callback = callback
        if self.gone:
            callback()
        elif self._watch is None:
            self._watch = asyncio.create_task(self._until_gone())

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
        """Stop watching, and drop all references, so that no cycle is left to the garbage collector."""
        if self._watch is not None:
            self._watch.cancel()
        self._watch = self._callback = None

    async def _until_gone(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone = True
        if self._callback is not None:
            self._callback()


def _cancel(task: asyncio.Task[Any]) -> None:
    task.cancel()
