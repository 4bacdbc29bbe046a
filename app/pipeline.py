"""One request's whole way, top to bottom, in `Pipeline.serve`.

The generation runs in a task of its own and writes into its `TokenStream`; HTTP handlers
only attach readers. Whatever can refuse a request comes before `stream.open()`, which lets
the status line out; after it there are only events.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from structlog.typing import FilteringBoundLogger

from app.admission.ticket import Ticket
from app.core import ChatRequest, Key, Prompt
from app.errors import Cancelled, ContextOverflow
from app.generation.answer_start import AnswerStart, NewAnswer
from app.generation.context import GenerationContext
from app.generation.engine_run import EngineRun
from app.generation.history import History
from app.generation.journal import Journal
from app.generation.journal_entry import Outcome
from app.generation.request_end import RequestEnd
from app.generation.request_safety import AnswerScreen, RequestSafety, SafetyOf
from app.generation.spending import SpendingLimits
from app.generation.trace import Trace
from app.metering.budget import Allowance
from app.metering.limiter import UNLIMITED, Lease
from app.metering.traffic import Traffic
from app.prefix_report.report import PrefixReport
from app.routing.backend import Backend, Backends
from app.stream.token_stream import TokenStream


class Pipeline:
    """The stages of a request, each one object with one verb."""

    def __init__(
        self,
        *,
        backends: Backends,
        history: History,
        journal: Journal,
        traffic: Traffic,
        safety_of: SafetyOf,
        prefixes: PrefixReport,
        log: FilteringBoundLogger,
    ) -> None:
        self._backends = backends
        self._history = history
        self._journal = journal
        self._new_answer = NewAnswer(history, journal)
        self._traffic = traffic
        self._safety_of = safety_of
        self._prefixes = prefixes
        self._log = log

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
        """Take a checked request to its answer. However it ends, `stream` is ended and `lease` settled."""
        start = start or self._new_answer
        backend, key_id = self._backends.of(request.model), None if key is None else key.id
        trace = Trace(request, start.progress.counts, key_id=key_id)
        check = self._safety_of(request, key)
        ending = RequestEnd(self._journal, self._traffic, self._log, trace, lease=lease, start=start)
        with ending.of(stream, check, backend.engine), self._history.claim(request):
            backend.precheck(request, key)
            turn = await start.load(request, check)
            prompt = start.resumed(await _render(check, backend, turn.request))
            trace.rendered(prompt)
            lease.correct(prompt)
            with await self._admit(backend, turn.request, prompt, stream, key=key, trace=trace) as ticket:
                stream.check_wanted()
                prompt = ticket.placed(prompt)
                entry = ending.settles(await start.reserve(turn, prompt, stream, trace, key))
                context = GenerationContext(turn.request, key, stream, trace, ticket, entry, check)
                limits = SpendingLimits(lease, allowance)
                screen: AnswerScreen | None = None
                async with EngineRun(backend.engine, prompt, context, limits, prefixes=self._prefixes) as run:
                    async for generated in run.deltas:
                        if (delta := run.counted(generated)) is None:
                            continue
                        if screen is None:  # nothing goes out before the verdict and the reservation
                            screen = await run.cleared(delta)
                        ready = screen.feed(delta)
                        for released in await screen.review() if screen.in_review else ready:
                            if released.finish_reason is not None:
                                trace.finished(released)
                            entry.released(released)
                            stream.append(released)  # into the ring and the sockets of its readers
                            if limits.budgeted and limits.on_released(entry):
                                break
                        if screen.halted is not None or limits.reached is not None:
                            break
                    outcome = await run.end(screen)
                usage = entry.usage()
                stream.conclude(usage, check.ended(screen, trace.counts, usage.withheld_tokens))
                if outcome is Outcome.CANCELLED:
                    stream.check_not_cut()
                await self._journal.settle(entry, trace.finish)
                stream.close()

    async def _admit(
        self,
        backend: Backend,
        request: ChatRequest,
        prompt: Prompt,
        stream: TokenStream,
        *,
        key: Key | None,
        trace: Trace,
    ) -> Ticket:
        """Wait for room in the engine, and for its turn, as long as the request is wanted."""
        admission = backend.admission
        stream.on_cancel(partial(admission.withdraw, request.request_id))
        stream.check_wanted()
        try:
            ticket = await admission.admit(request, prompt, key)
        except Cancelled:
            stream.check_not_cut()
            raise
        stream.on_cancel(lambda: None)
        trace.admitted()
        return ticket


async def _render(check: RequestSafety, backend: Backend, request: ChatRequest) -> Prompt:
    """The prompt as the model is to read it. Raises what `Engine.render` does."""
    try:
        return await check.render(backend.engine, request)
    except ContextOverflow:
        if not request.placement.length_capped:
            raise
        # The room that is left is less than a shortened answer may take.
        return await check.render(backend.engine, replace(request, max_tokens=None))
