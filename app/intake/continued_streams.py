"""Streams by id: in memory, suspended by the process before and then continued, or as they were stored.

Two clients that return at once get one stream: nothing is awaited between the last look for it in memory
and its registration. A client that returns while the engine loads gets its answer's headers, and heartbeats.

`Suspensions` (app.resume.suspensions) lists every way on which a suspended request ends.
"""

from __future__ import annotations

import asyncio
import contextlib

from app.core import Key
from app.errors import EngineNotReady
from app.metering.budgets import Allowance
from app.metering.limits import Lease
from app.resume.continue_answer import ContinuedStart
from app.resume.snapshot import SuspendedRequest
from app.runtime import Runtime
from app.store.events import StoredStream
from app.store.key_table import now_us
from app.stream.archive import MakeWire
from app.stream.ring import Ring
from app.stream.token_stream import TokenStream

POLL_S = 0.2
"""Seconds between two looks at an engine that loads."""


class ContinuedStreams:
    """Finds streams that are not in memory, and continues those that were suspended."""

    def __init__(self, runtime: Runtime, limit_bytes: int) -> None:
        """A stream's ring holds `limit_bytes`."""
        self._runtime = runtime
        self._limit_bytes = limit_bytes

    async def find_or_continue(
        self, owner: str, request_id: str, make_wire: MakeWire, after: int, *, continues: bool = True
    ) -> TokenStream | None:
        """The owner's stream, for a reader that has received event `after`; None where there is none.

        Unless it `continues`, a suspended one is only looked at. Raises what `Archive.find` does, Draining,
        and ReplayPositionUnknown where a suspended stream never sent `after`.
        """
        runtime = self._runtime
        loaded = await runtime.suspensions.load(owner, request_id)
        if (stream := runtime.streams.find(request_id, owner)) is not None:
            return stream  # another client was faster
        if loaded is not None:
            stored, suspended = loaded
            if suspended is None or (ring := self._ring(stored)) is None:
                await runtime.suspensions.settle([request_id])
            else:
                chat = suspended.turn.request
                released, unseen = suspended.progress.released, stored.usage.all_withheld
                stream = TokenStream.continued(chat, make_wire(chat), ring, released, unseen=unseen)
                stream.check_sent(after)  # for a reader that is refused, the answer must not be continued
                if not continues:
                    return stream
                runtime.suspensions.extend_deadline(request_id)
                if (stream := await self._continue(suspended, stream)) is not None:
                    return stream
        return await runtime.archive.find(owner, request_id, make_wire, after)

    async def _continue(self, suspended: SuspendedRequest, stream: TokenStream) -> TokenStream | None:
        """The stream of a suspended request, continued; None where its key is no longer valid."""
        runtime, chat = self._runtime, suspended.turn.request
        key = None if suspended.key_id is None else runtime.keys.get(suspended.key_id)
        if suspended.key_id is not None and (key is None or key.status(now_us()) != "active"):
            await runtime.suspensions.settle([chat.request_id])
            return None
        allowance = await runtime.budgets.resume(key, chat.request_id)
        if (other := runtime.streams.find(chat.request_id, chat.owner)) is not None:
            return other  # another client was faster
        if chat.request_id not in runtime.suspensions:
            return None  # it was settled meanwhile
        runtime.streams.add_continued(stream)
        lease = runtime.limiter.resume(key, chat.request_id, chat.n, suspended.progress.counts)
        runtime.streams.run(stream, self._serve(suspended, stream, key, lease, allowance))
        return stream

    async def _serve(
        self,
        suspended: SuspendedRequest,
        stream: TokenStream,
        key: Key | None,
        lease: Lease,
        allowance: Allowance | None,
    ) -> None:
        runtime, models = self._runtime, None if key is None else key.terms.models
        start = ContinuedStart(
            suspended, runtime.journal, runtime.suspensions, lambda model: runtime.check_model(model, models)
        )
        await self._until_ready(stream)
        await runtime.pipeline.serve(
            stream.request, stream, key=key, lease=lease, allowance=allowance, start=start
        )

    async def _until_ready(self, stream: TokenStream) -> None:
        """Wait until requests can be served, or the stream is cancelled."""
        cancelled = asyncio.Event()
        stream.on_cancel(cancelled.set)
        while not cancelled.is_set():
            try:
                self._runtime.check_ready()
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
