"""One request's whole way, top to bottom, in `Pipeline.serve`.

The generation runs in a task of its own and writes into its `TokenStream`; HTTP handlers
only attach readers. Whatever can refuse a request precedes `stream.open()`, which lets
the status line out; after it there are only events.

From the route to the socket:

    GenerationRoutes.create        app/api/routes/generations.py   the request's task
    Intake.open_stream             app/intake/open_stream.py
    StreamRegistry.run             app/stream/registry.py          starts the generation's task
    Pipeline.serve                 here
    EngineRun                      app/pipeline/engine_run.py      opens the stream, as `Intake.events` awaits
    TokenStream.append             app/stream/token_stream.py      into the ring
    Outbox                         app/stream/token_stream.py      all streams together, in the next tick
    Reader.on_event                app/stream/reader.py
    Connection.write               app/api/http/protocol.py        a frame for all that is waiting

`EngineRun.end` decides how the generation ends. A success is settled and closed in the last lines of `serve`;
every other end, and the release of the lease, is in `Finalizer.settle_on_exit` (app.pipeline.finalize).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from structlog.typing import FilteringBoundLogger

from app.admission.ticket import Ticket
from app.core import ChatRequest, Key, Prompt
from app.errors import Cancelled, ContextOverflow
from app.journal.entry import Outcome
from app.journal.history import History
from app.journal.journal import Journal
from app.metering.budgets import Allowance
from app.metering.limits import UNLIMITED, Lease
from app.metering.traffic import Traffic
from app.pipeline.engine_run import EngineRun
from app.pipeline.finalize import Finalizer
from app.pipeline.live import LiveRequests
from app.pipeline.trace import Trace
from app.prefix_report.report import PrefixReport
from app.resume.continue_answer import AnswerStart
from app.resume.suspensions import Suspensions
from app.routing.backend import Backend, Backends
from app.safety.session.session import AnswerScreen, SafetySession, SessionOf
from app.stream.token_stream import TokenStream


class Pipeline:
    """The stages of a request, each one object with one verb."""

    def __init__(
        self,
        *,
        backends: Backends,
        history: History,
        journal: Journal,
        suspensions: Suspensions,
        traffic: Traffic,
        session_of: SessionOf,
        prefixes: PrefixReport,
        live: LiveRequests,
        log: FilteringBoundLogger,
        on_ended: Callable[[Trace], None] | None = None,
    ) -> None:
        self._backends = backends
        self._history = history
        self._journal = journal
        self._suspensions = suspensions
        self._fresh_start = AnswerStart(history, journal)
        self._traffic = traffic
        self._session_of = session_of
        self._prefixes = prefixes
        self._live = live
        self._log = log
        self._on_ended = on_ended

    async def serve(
        self,
        request: ChatRequest,
        stream: TokenStream,
        *,
        key: Key | None = None,
        lease: Lease = UNLIMITED,
        allowance: Allowance | None = None,
        start: AnswerStart | None = None,
    ) -> None:
        """Take a checked request to its answer. In every case `stream` is ended and `lease` released."""
        start, key_id = start or self._fresh_start, None if key is None else key.id
        trace = Trace(request, start.progress.counts, stream.finish_reasons(), key_id=key_id)
        backend, session = self._backends.of(request.model), self._session_of(request, key)
        finalizer = Finalizer(
            self._journal, self._suspensions, self._traffic, self._log, trace, lease, start, self._on_ended
        )
        tracked, settled = self._live.tracked(stream, trace, key), finalizer.settle_on_exit(stream, session)
        with tracked, settled, self._history.claim(request):
            backend.precheck(request, key)
            turn = await start.load(request, session)
            prompt = start.engine_prompt(await _render(session, backend, turn.request))
            trace.rendered(prompt)
            lease.correct(prompt)
            with await _admit(backend, turn.request, prompt, stream, key, trace) as ticket:
                stream.check_wanted()
                prompt = ticket.with_replica(prompt)
                entry = await start.reserve(turn, prompt, stream, trace.counts, key)
                finalizer.attach_reservation(entry)
                screen: AnswerScreen | None = None
                engine_run = EngineRun(
                    backend.engine, prompt, entry, session, ticket, trace, lease, allowance, self._prefixes
                )
                async with engine_run as run:
                    async for generated in run.deltas:
                        if (delta := run.counted(generated)) is None:
                            continue
                        if screen is None:  # nothing is sent before the verdict and the reservation
                            screen = await run.wait_until_releasable(delta)
                        ready = screen.feed(delta)
                        if not ready and screen.in_review:
                            ready = await screen.review()
                        for released in ready:
                            if released.finish_reason is not None:
                                trace.record_finish(released)
                            entry.released(released)
                            # Into the ring, and to its readers in the next tick of the loop.
                            stream.append(released)
                            if run.has_allowance and run.charge():
                                break
                        if screen.halted is not None or run.exhausted is not None:
                            break
                    outcome = await run.end(screen)
                ticket.release()  # the next request's room does not wait for the commit
                usage = entry.usage()
                stream.conclude(usage, session.conclude(screen, trace.counts, usage.withheld_tokens))
                if outcome is Outcome.CANCELLED:
                    stream.check_not_stopping()
                await self._journal.settle(entry, trace.finish)
                stream.close()


async def _render(session: SafetySession, backend: Backend, request: ChatRequest) -> Prompt:
    """The prompt as the model is to read it. Raises what `SafetySession.render` does."""
    try:
        return await session.render(backend.engine, request)
    except ContextOverflow:
        if not request.placement.length_capped:
            raise
        # The context has less room than degraded mode's `max_tokens`, so the answer gets what is left.
        return await session.render(backend.engine, replace(request, max_tokens=None))


async def _admit(
    backend: Backend, request: ChatRequest, prompt: Prompt, stream: TokenStream, key: Key | None, trace: Trace
) -> Ticket:
    """Wait until the request is admitted to the engine, as long as it is wanted.

    If its stream is cancelled meanwhile, `Admission.withdraw` takes it out of the queue.
    """
    admission = backend.admission
    stream.on_cancel(partial(admission.withdraw, request.request_id))
    stream.check_wanted()
    try:
        ticket = await admission.admit(request, prompt, key)
    except Cancelled:
        stream.check_not_stopping()
        raise
    stream.on_cancel(lambda: None)
    trace.admitted()
    return ticket
