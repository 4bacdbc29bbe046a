"""The way of an answer's tokens out of an engine: the sink of a choice, the stream of a request, the tally.

A request's choices are parsed by a `ChoiceSink` each. These write to one `GenerationStream`, which a single
task reads. A future is made only when that task has to wait: the cost per token is that of a deque.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sized
from typing import Any, Protocol

from app.core import Counts, Delta
from app.errors import ServingError

REMEMBERED = 4096


class ChoiceSink(Protocol):
    """The receiver of one choice's steps (app.engine.sglang.parse)."""

    counts: Counts

    def take(
        self,
        text: str,
        token_ids: Any,
        finish: dict[str, Any] | None,
        counts: Counts,
        batch: Any,
        row: int,
    ) -> None:
        """Take a step's output. `finish` is SGLang's finish reason, which is given exactly once."""
        ...

    def fail(self, error: ServingError) -> None:
        """No more output will follow."""
        ...


class GenerationStream(AsyncIterator[Delta]):
    """The deltas of one generation, all its choices interleaved: ends after the last of each, or raises."""

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
        """True if `abort` was called."""

    @property
    def failed(self) -> bool:
        """True if it ended with an error, or will once it is read."""
        return self._error is not None

    @property
    def begun(self) -> bool:
        """True if the first delta was asked for: only then is the engine."""
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
        """End the stream with `error`, after the earlier deltas."""
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


class TokenTally:
    """The number of one request's token ids so far, all choices together, counted where they are handed over.

    It is counted apart from what is billed, and the ledger is compared with it: nothing here reads
    `Delta.counts`, nothing there reads this. An engine that keeps the ids of each choice has them counted
    where they are kept, at no cost per token.
    """

    __slots__ = ("_added", "_kept")

    def __init__(self) -> None:
        self._added = 0
        self._kept: list[Sized] = []

    @property
    def token_ids(self) -> int:
        """Token ids that were handed over."""
        return self._added + sum(map(len, self._kept))

    def add(self, token_ids: int) -> None:
        """Count token ids that were handed over."""
        self._added += token_ids

    def count(self, kept: Sized) -> None:
        """Count the ids that are in `kept` whenever the number is asked for."""
        self._kept.append(kept)


class Tallies:
    """The tally of each request: running, and ended but not asked for yet.

    Of the ended ones the oldest are forgotten beyond `remembered`.
    """

    def __init__(self, remembered: int = REMEMBERED) -> None:
        self._remembered = remembered
        self._running: dict[str, TokenTally] = {}
        self._ended: dict[str, int] = {}

    def begin(self, rid: str) -> TokenTally:
        """A tally for a new request."""
        tally = self._running[rid] = TokenTally()
        return tally

    def end(self, rid: str) -> None:
        """No more ids of `rid` will reach its reader."""
        tally = self._running.pop(rid, None)
        if tally is None:
            return
        self._ended[rid] = tally.token_ids
        if len(self._ended) > self._remembered:
            del self._ended[next(iter(self._ended))]

    def pop(self, rid: str) -> int:
        """Ids handed over for `rid` so far, 0 when unknown; an ended one is forgotten."""
        tally = self._running.get(rid)
        return self._ended.pop(rid, 0) if tally is None else tally.token_ids
