"""The client of one HTTP request: reads its body, and watches for its leaving."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

from app.errors import BadRequest, BodyTooLarge

T = TypeVar("T")


class Client:
    """Reads the body of a request, then watches for the client to leave."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._watch: asyncio.Task[None] | None = None
        self._callback: Callable[[], None] | None = None
        self.gone = False

    async def body(
        self,
        limit_bytes: int,
        declared: str | None,
        timeout_s: float,
        hold: Callable[[int], Awaitable[None]],
    ) -> bytes:
        """The whole request body; `declared` is its content-length header.

        `hold` is awaited with the bytes there are before more are taken.
        Raises BodyTooLarge, BadRequest after `timeout_s`, ClientDisconnect, and what `hold` does.
        """
        if declared is not None and declared.isdigit() and int(declared) > limit_bytes:
            raise _too_large(limit_bytes)
        body = bytearray()
        try:
            async with asyncio.timeout(timeout_s):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise ClientDisconnect
                    body += message.get("body", b"")
                    if len(body) > limit_bytes:
                        raise _too_large(limit_bytes)
                    await hold(len(body))
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            raise BadRequest(
                f"The body did not arrive within {timeout_s:g} s.", code="body_timeout"
            ) from None

    def on_gone(self, callback: Callable[[], None]) -> None:
        """Call `callback` when the client leaves, or now if it has left. Replaces an earlier callback."""
        self._callback = callback
        if self.gone:
            callback()
        elif self._watch is None:
            self._watch = asyncio.create_task(self._until_gone())

    async def while_here(self, work: Coroutine[Any, Any, T], name: str) -> T:
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


def _too_large(limit_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"The body is over {limit_bytes} bytes, the most that is read here; send less.")
