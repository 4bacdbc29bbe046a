"""Streams that the process before has suspended: found by their ids, and gone on with.

Two clients that return at once find one stream: nothing is awaited between the last look for it in memory
and its adoption. A client that returns while the engine loads has the headers of its answer, and heartbeats.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from typing import NamedTuple

from app.core import Key
from app.errors import EngineNotReady
from app.generation.answer_start import ContinuedAnswer
from app.generation.journal import Journal
from app.generation.suspended import SuspendedRequest
from app.generation.suspensions import Suspensions
from app.metering.budgets import Allowance, Budgets
from app.metering.continued_lease import ContinuedLease
from app.metering.limits import Limiter
from app.pipeline import Pipeline
from app.store.events import StoredStream
from app.store.key_table import KeyTable, now_us
from app.stream.archive import Archive, MakeWire
from app.stream.registry import StreamRegistry
from app.stream.ring import Ring
from app.stream.token_stream import TokenStream

POLL_S = 0.2
"""Seconds between two looks at an engine that loads."""


class Parts(NamedTuple):
    """The parts of the server that a continued stream runs through."""

    streams: StreamRegistry
    archive: Archive
    suspensions: Suspensions
    journal: Journal
    pipeline: Pipeline
    keys: KeyTable
    limiter: Limiter
    budgets: Budgets


class Continuations:
    """Finds streams that are not in memory; a suspended one goes on with that."""

    def __init__(
        self,
        parts: Parts,
        limit_bytes: int,
        *,
        check_ready: Callable[[], None],
        check_model: Callable[[str, Collection[str] | None], None],
    ) -> None:
        """A stream's ring holds `limit_bytes`. For the checks see ChatRoutes."""
        self._parts = parts
        self._limit_bytes = limit_bytes
        self._check_ready = check_ready
        self._check_model = check_model

    async def find(
        self, owner: str, request_id: str, make_wire: MakeWire, after: int, *, begin: bool = True
    ) -> TokenStream | None:
        """The owner's stream, for a reader that has received event `after`; None where there is none.

        Without `begin`, a suspended one is only looked at. Raises what `Archive.find` does, Draining, and
        ReplayPositionUnknown where a suspended stream never sent `after`.
        """
        parts = self._parts
        loaded = await parts.suspensions.load(owner, request_id)
        if (stream := parts.streams.find(request_id, owner)) is not None:
            return stream  # another client was faster
        if loaded is not None:
            stored, suspended = loaded
            if suspended is None or (ring := self._ring(stored)) is None:
                await parts.suspensions.settle([request_id])
            else:
                chat = suspended.turn.request
                stream = TokenStream.continued(chat, make_wire(chat), ring, suspended.progress.released)
                stream.check_sent(after)  # a reader that is refused must not have the answer go on unread
                if not begin:
                    return stream
                parts.suspensions.asked_for(request_id)
                if (stream := await self._go_on(suspended, stream)) is not None:
                    return stream
        return await parts.archive.find(owner, request_id, make_wire, after)

    async def _go_on(self, suspended: SuspendedRequest, stream: TokenStream) -> TokenStream | None:
        """The stream of a suspended request, which goes on; None where its key is no longer valid."""
        parts, chat, counts = self._parts, suspended.turn.request, suspended.progress.counts
        key = None if suspended.key_id is None else parts.keys.get(suspended.key_id)
        if suspended.key_id is not None and (key is None or key.status(now_us()) != "active"):
            await parts.suspensions.settle([chat.request_id])
            return None
        allowance = await parts.budgets.resume(key, chat.request_id)
        if (other := parts.streams.find(chat.request_id, chat.owner)) is not None:
            return other  # another client was faster
        if chat.request_id not in parts.suspensions:
            return None  # it was settled meanwhile
        parts.streams.adopt(stream)
        lease = ContinuedLease(parts.limiter.resume(key, chat.request_id, chat.n), counts)
        parts.streams.run(stream, self._serve(suspended, stream, key, lease, allowance))
        return stream

    async def _serve(
        self,
        suspended: SuspendedRequest,
        stream: TokenStream,
        key: Key | None,
        lease: ContinuedLease,
        allowance: Allowance | None,
    ) -> None:
        parts, models = self._parts, None if key is None else key.terms.models
        start = ContinuedAnswer(
            suspended, parts.journal, parts.suspensions, lambda model: self._check_model(model, models)
        )
        await self._until_ready(stream)
        await parts.pipeline.serve(
            stream.request, stream, key=key, lease=lease, allowance=allowance, start=start
        )

    async def _until_ready(self, stream: TokenStream) -> None:
        """Wait until requests can be served, or the stream is cancelled."""
        cancelled = asyncio.Event()
        stream.on_cancel(cancelled.set)
        while not cancelled.is_set():
            try:
                self._check_ready()
            except EngineNotReady:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(POLL_S):
                        await cancelled.wait()
            else:
                break
        stream.on_cancel(lambda: None)

    def _ring(self, stored: StoredStream) -> Ring | None:
        """All events of a stored stream; None where some are missing or damaged."""
        try:
            ring = Ring.restore(stored.segments, self._limit_bytes)
        except ValueError:
            return None
        return ring if ring.first_id == 1 else None
