"""One request's whole way, top to bottom, in `Pipeline.serve`.

The generation runs in a task of its own and writes into its `TokenStream`; HTTP handlers
only attach readers. Whatever can refuse a request comes before `stream.open()`, which lets
the status line out; after it there are only events.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from structlog.typing import FilteringBoundLogger

from app.admission.ticket import Ticket
from app.core import ChatRequest, Prompt
from app.errors import Cancelled, ContextOverflow, Draining, InternalError, ServingError, Unavailable
from app.generation.history import History
from app.generation.journal import Journal
from app.generation.journal_entry import Entry
from app.generation.release import OnCached, Release
from app.generation.safety_check import Check, Checks
from app.generation.trace import Trace
from app.log import where
from app.metering.budget import Allowance
from app.metering.limiter import UNLIMITED, Lease
from app.metering.traffic import Traffic
from app.prefix_report.report import PrefixReport
from app.routing.backend import Backend, Backends
from app.store.keys import Key
from app.store.ledger import Usage
from app.store.usage_body import usage_body
from app.stream.token_stream import TokenStream


class Pipeline:
    """The stages of a request, each one object with one verb."""

    def __init__(
        self,
        places: Backends,
        history: History,
        journal: Journal,
        traffic: Traffic,
        checks: Checks,
        log: FilteringBoundLogger,
        prefixes: PrefixReport,
    ) -> None:
        self._places = places
        self._history = history
        self._journal = journal
        self._traffic = traffic
        self._checks = checks
        self._log = log
        self._prefixes = prefixes

    async def serve(
        self,
        request: ChatRequest,
        stream: TokenStream,
        lease: Lease = UNLIMITED,
        allowance: Allowance | None = None,
        key: Key | None = None,
    ) -> None:
        """Take `request` from validated to answered; every outcome ends in `stream`, and settles `lease`."""
        trace = Trace(request)
        place = self._places.of(request.model)
        check = self._checks.of(request, key)
        entry: Entry | None = None
        try:
            with self._history.claim(request):
                place.precheck(request, key)
                asked = await self._history.load(request)
                check.look(asked)
                prompt = await _render(check, place, asked.request)
                trace.rendered(prompt)
                lease.correct(prompt)
                with await self._turn(place, asked.request, prompt, stream, key) as ticket:
                    trace.admitted()
                    stream.check_wanted()
                    entry = await self._journal.reserve(asked, prompt, stream, trace.counts)
                    cached = self._cached(asked.request, key)
                    release = Release(
                        place.engine, check, stream, trace, entry, ticket, allowance, lease, cached
                    )
                    while not await release.run(prompt):  # other words in front than it was rendered with
                        prompt = await _render(check, place, asked.request)
                usage = entry.usage()
                _conclude(stream, usage, check.ended(release.way, trace.counts, usage.withheld_tokens))
                if not entry.ended_by_itself:
                    stream.check_not_cut()
                await self._journal.settle(entry, trace.outcome)
                stream.close()
        except ServingError as error:
            _withdraw(lease, entry, error)
            trace.failed(error.code)
            stream.fail(error)
        except asyncio.CancelledError:
            trace.failed("cancelled")
            place.engine.abort(check.rid)
            stream.fail(Draining("The server stopped before the answer was complete; ask again."))
            raise
        except Exception as exc:  # noqa: BLE001  # whatever it is, the client gets a truthful end
            trace.failed("internal_error")
            self._log.error("pipeline_broke", request_id=request.request_id, error=where(exc))
            place.engine.abort(check.rid)
            stream.fail(InternalError("The server failed to answer this request; it may be sent again."))
        finally:
            lease.settle(trace.counts)
            if entry is not None:
                self._journal.settle_later(entry, trace.outcome)
            self._traffic.ended(request.model, trace.outcome, trace.timings())
            self._log.info("request", cancelled=stream.cancelled, **trace.fields())
            check.close(stream)  # last: it reads the whole answer, and nothing above may depend on that

    async def _turn(
        self,
        place: Backend,
        request: ChatRequest,
        prompt: Prompt,
        stream: TokenStream,
        key: Key | None,
    ) -> Ticket:
        """Wait for room in the engine, and for its turn, as long as the request is wanted."""
        admission = place.admission
        stream.on_cancel(partial(admission.withdraw, request.request_id))
        stream.check_wanted()
        try:
            ticket = await admission.admit(request, prompt, key)
        except Cancelled:
            stream.check_not_cut()
            raise
        stream.on_cancel(lambda: None)
        return ticket

    def _cached(self, request: ChatRequest, key: Key | None) -> OnCached:
        """Has the prefix report told how much of the request's prompt was cached."""
        key_id = None if key is None else key.id
        return partial(self._prefixes.saw, request, key_id=key_id, salt=request.cache_salt)


async def _render(check: Check, place: Backend, request: ChatRequest) -> Prompt:
    """The prompt as the model is to read it. Raises what `Engine.render` does."""
    try:
        return await check.render(place.engine, request)
    except ContextOverflow:
        if not request.cut:
            raise
        # The room that is left is less than a shortened answer may take.
        return await check.render(place.engine, replace(request, max_tokens=None))


def _withdraw(lease: Lease, entry: Entry | None, error: ServingError) -> None:
    """A request that was refused for lack of room is none of those that its key may make."""
    if entry is None and isinstance(error, Unavailable):
        lease.withdraw()


def _conclude(stream: TokenStream, usage: Usage, said: Mapping[str, Any] | None) -> None:
    """Tell what follows the last token: what the screens said, and the bill."""
    if said is not None:
        stream.notice("moderation", said)
    stream.usage = usage_body(usage)
    if stream.request.include_usage:
        stream.notice("usage", stream.usage)
