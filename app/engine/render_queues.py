"""Threads for rendering: short requests have one of their own, the others share several.

| queue | which requests | time of a request |
|---|---|---|
| short | at most `SHORT_BYTES` of text, without tools, grammar and media | below 25 ms, at 1.5 us a byte |
| long | all others | that of tokenizing the longest prompt that fits |

In each queue owners alternate, so that one owner's many requests do not delay another's.
Used by one event loop.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from app.concurrency.owner_threads import OwnerThreads, ThreadsClosed, Work
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
    """The threads of one engine for conversions."""

    def __init__(self) -> None:
        workers = max(MIN_LONG_WORKERS, min(MAX_LONG_WORKERS, len(os.sched_getaffinity(0)) // 4))
        self._short = OwnerThreads("render-short")
        self._long = OwnerThreads("render-long", workers)

    async def run(self, convert: Callable[[ChatRequest], T], request: ChatRequest) -> T:
        """The result of `convert(request)`, owners alternating. Raises its errors, EngineNotReady."""
        queue = self._short if is_short(request) else self._long
        return await _run(queue, request.owner, convert, request)

    async def run_sized(self, owner: str, size_bytes: int, function: Callable[[], T]) -> T:
        """`function()` over so many bytes of text, owners alternating. Raises as `run` does."""
        queue = self._short if size_bytes <= SHORT_BYTES else self._long
        return await _run(queue, owner, function)

    def close(self) -> None:
        """Start nothing more; what runs ends by itself."""
        for queue in (self._short, self._long):
            queue.close()


async def _run(queue: OwnerThreads, owner: str, function: Callable[..., T], *arguments: Any) -> T:
    try:
        return await queue.run(Work(owner), function, *arguments)
    except ThreadsClosed:
        raise EngineNotReady("The engine is being stopped.", retry_after_s=5) from None


def is_short(request: ChatRequest) -> bool:
    """True if rendering this takes a few milliseconds; reads no more of it than a short one has."""
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
