"""One request's whole way, top to bottom, in `Pipeline.serve`.

The generation runs in a task of its own and writes into its `TokenStream`; HTTP handlers
only attach readers. Whatever can refuse a request comes before `stream.open()`, which lets
the status line out; after it there are only events.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from structlog.typing import FilteringBoundLogger

from app.core import ChatRequest, Counts, Delta, Engine, Health
from app.entry import Entry
from app.errors import Draining, EngineNotReady, InternalError, ServingError
from app.history import History
from app.journal import Journal
from app.log import where
from app.metering.budget import Allowance
from app.metering.limiter import UNLIMITED, Lease
from app.metering.traffic import Traffic
from app.stream import TokenStream, usage_of
from app.trace import Trace


class Pipeline:
    """The stages of a request, each one object with one verb."""

    def __init__(
        self,
        engine: Engine,
        history: History,
        journal: Journal,
        traffic: Traffic,
        log: FilteringBoundLogger,
    ) -> None:
        self._engine = engine
        self._history = history
        self._journal = journal
        self._traffic = traffic
        self._log = log

    async def serve(
        self,
        request: ChatRequest,
        stream: TokenStream,
        lease: Lease = UNLIMITED,
        allowance: Allowance | None = None,
    ) -> None:
        """Take `request` from validated to answered; every outcome ends in `stream`, and settles `lease`."""
        trace = Trace(request)
        entry: Entry | None = None
        try:
            with self._history.claim(request):
                self._check_ready()
                asked = await self._history.load(request)
                prompt = await self._engine.render(asked.request)
                trace.rendered(prompt)
                lease.correct(prompt)
                stream.check_wanted()
                entry = await self._journal.reserve(asked, prompt, stream, trace.counts)
                stream.open(request.n)
                deltas = self._engine.generate(request.request_id, prompt)
                stream.on_cancel(lambda: self._engine.abort(request.request_id))
                await self._release(deltas, stream, trace, entry, allowance)
                stream.usage = usage_of(trace.counts)
                if request.include_usage:
                    stream.notice("usage", stream.usage)
                if not entry.ended_by_itself:
                    stream.check_not_cut()
                await self._journal.settle(entry, trace.outcome)
                stream.close()
        except ServingError as error:
            trace.failed(error.code)
            stream.fail(error)
        except asyncio.CancelledError:
            trace.failed("cancelled")
            self._engine.abort(request.request_id)
            stream.fail(Draining("The server stopped before the answer was complete; ask again."))
            raise
        except Exception as exc:  # noqa: BLE001  # whatever it is, the client gets a truthful end
            trace.failed("internal_error")
            self._log.error("pipeline_broke", request_id=request.request_id, error=where(exc))
            self._engine.abort(request.request_id)
            stream.fail(InternalError("The server failed to answer this request; it may be sent again."))
        finally:
            lease.settle(trace.counts)
            if entry is not None:
                self._journal.settle_later(entry, trace.outcome)
            self._traffic.ended(request.model, trace.outcome, trace.timings())
            self._log.info("request", cancelled=stream.cancelled, **trace.fields())

    async def _release(
        self,
        deltas: AsyncIterator[Delta],
        stream: TokenStream,
        trace: Trace,
        entry: Entry,
        allowance: Allowance | None,
    ) -> None:
        """Read the generation to its end; the first release waits for the reservation."""
        try:
            async for delta in deltas:
                if entry.request_seq is None:
                    await self._durable(entry, deltas)
                trace.saw(delta)
                entry.saw(delta)
                stream.append(delta)
                if allowance is not None and allowance.spent_up(entry.usage(), entry.price):
                    await self._cut(deltas, stream, trace, entry, allowance)
                    break
            entry.read_whole = True
            entry.ended_by_itself = not trace.stopped
        finally:
            entry.handed_over = self._engine.handed_over(stream.request_id)

    async def _cut(
        self,
        deltas: AsyncIterator[Delta],
        stream: TokenStream,
        trace: Trace,
        entry: Entry,
        allowance: Allowance,
    ) -> None:
        """End at the token that was released last; what the engine made beyond it is withheld, not billed."""
        released = entry.usage().completion_tokens
        unfinished = trace.unfinished
        self._engine.abort(stream.request_id)
        async for delta in deltas:
            trace.saw(delta if delta.finish_reason is None else delta._replace(finish_reason="length"))
        entry.withheld_tokens = entry.usage().completion_tokens - released
        for choice in unfinished:
            stream.append(Delta(choice, "text", "", (), trace.counts.get(choice, Counts()), "length"))
        if unfinished:
            stream.notice("budget", allowance.as_notice())

    async def _durable(self, entry: Entry, deltas: AsyncIterator[Delta]) -> None:
        """Wait for the reservation; without one the generation is stopped and nothing released."""
        try:
            await entry.committed()
        except ServingError:
            self._engine.abort(entry.stream.request_id)
            async for _ in deltas:
                pass
            raise

    def _check_ready(self) -> None:
        if self._engine.health() is not Health.READY:
            raise EngineNotReady(
                f"The engine is {self._engine.health().value}; see /readyz.", retry_after_s=5
            )
