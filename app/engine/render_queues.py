"""Threads for rendering: short requests have one of their own, the others share several.

| queue | which requests | time of a request |
|---|---|---|
| short | at most `SHORT_BYTES` of text, without tools, grammar and media | below 25 ms, at 1.5 us a byte |
| long | all others | that of tokenizing the longest prompt that fits |

In each queue owners take turns, so that one owner's many requests do not delay another's.
Used by one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from app.core import ChatRequest
from app.errors import EngineNotReady

T = TypeVar("T")

SHORT_BYTES = 16 * 1024
MIN_LONG_WORKERS = 2
"""Threads for long requests, at least: so that one does not make another wait."""
MAX_LONG_WORKERS = 4
"""Each takes a core while it tokenizes, and between that Python's lock from the event loop."""
NODE_BYTES = 32
"""The cost of validating an array, an object or a scalar, as bytes of text."""
UTF8_BYTES = 3
"""Bytes of a character of text, but for the rare ones that have four."""
MAKES_LONG = frozenset({"tools", "response_format", "regex", "ebnf"})
"""Checking a schema takes 20 us a byte, compiling a grammar longer."""


class RenderQueues:
    """Runs conversions in threads; see the module."""

    def __init__(self) -> None:
        workers = max(MIN_LONG_WORKERS, min(MAX_LONG_WORKERS, len(os.sched_getaffinity(0)) // 4))
        self._short = _RenderQueue("render-short", 1)
        self._long = _RenderQueue("render-long", workers)

    async def run(self, convert: Callable[[ChatRequest], T], request: ChatRequest) -> T:
        """`convert(request)`, in its turn. Raises what that does, EngineNotReady once they are closed."""
        queue = self._short if is_short(request) else self._long
        return await queue.run(request.owner, convert, request)

    async def run_sized(self, owner: str, size_bytes: int, function: Callable[[], T]) -> T:
        """`function()` over so many bytes of text, in the owner's turn. Raises as `run` does."""
        queue = self._short if size_bytes <= SHORT_BYTES else self._long
        return await queue.run(owner, function)

    def close(self) -> None:
        """Start nothing more; what runs goes on."""
        for queue in (self._short, self._long):
            queue.close()


class _RenderQueue:
    """A few threads that owners take turns at."""

    def __init__(self, name: str, workers: int) -> None:
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix=name)
        self._idle = workers
        self._waiting: dict[str, deque[asyncio.Future[None]]] = {}
        """The waiting requests by owner, in the order of their turns."""

    async def run(self, owner: str, function: Callable[..., T], *arguments: Any) -> T:
        loop = asyncio.get_running_loop()
        await self._turn(owner, loop)
        try:
            job = self._threads.submit(function, *arguments)
        except RuntimeError:  # closed meanwhile: those behind are to learn of it too
            self._release()
            raise EngineNotReady("The engine is being stopped.", retry_after_s=5) from None
        job.add_done_callback(lambda _: self._ended(loop))
        return await asyncio.wrap_future(job)

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    async def _turn(self, owner: str, loop: asyncio.AbstractEventLoop) -> None:
        if self._idle:
            self._idle -= 1
            return
        turn = loop.create_future()
        self._waiting.setdefault(owner, deque()).append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():
                self._release()
            raise

    def _ended(self, loop: asyncio.AbstractEventLoop) -> None:
        """Free the worker, in its thread. The caller may be gone: a thread cannot be cancelled."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        while self._waiting:
            owner = next(iter(self._waiting))
            turns = self._waiting.pop(owner)
            turn = turns.popleft()
            if turns:
                self._waiting[owner] = turns  # behind the others
            if not turn.done():
                turn.set_result(None)
                return
        self._idle += 1


def is_short(request: ChatRequest) -> bool:
    """Whether rendering this takes a few milliseconds; looks at no more of it than a short one has."""
    body = request.body
    if any(body.get(name) is not None for name in MAKES_LONG):
        return False
    left_bytes = SHORT_BYTES - NODE_BYTES * sum(map(len, request.past))
    values: list[Any] = list(body.values())
    while values and left_bytes >= 0:
        value = values.pop()
        left_bytes -= NODE_BYTES
        if isinstance(value, str):
            left_bytes -= len(value) if value.isascii() else UTF8_BYTES * len(value)
        elif isinstance(value, dict):
            if value.get("type", "text") != "text" and "role" not in value:
                return False
            values += value.values()
        elif isinstance(value, list | tuple):
            if len(value) * NODE_BYTES > left_bytes:
                return False
            values += value
    return left_bytes >= 0
