"""One prompt in the engine: sent, released from, stopped early if a screen or a limit says so.

    enter ──▶ deltas, each `counted` ──▶ `wait_until_releasable`, once ──▶ `end` ──▶ exit

The engine reads the prompt while the full verdict on it is made and the reservation is written. The
status line goes out with the verdict; the first token needs the reservation too.
An early stop aborts the engine first and then reads on: its final deltas have the true counts.
`Finalizer` (app.pipeline.finalize) ends the streams of requests that do not reach `end`: they were refused,
failed or suspended.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from functools import partial
from types import TracebackType
from typing import Self

from app.admission.ticket import Ticket
from app.core import Delta, Engine, FinishReason, Prompt
from app.errors import ContentFiltered, ServingError
from app.journal.entry import JournalEntry, Outcome
from app.metering.budgets import Allowance
from app.metering.limits import Lease
from app.pipeline.trace import Trace
from app.prefix_report.report import PrefixReport
from app.resume.skip_released import SkipReleased
from app.safety.session.session import AnswerScreen, SafetySession
from app.safety.verdict import ScreenFailed
from app.stream.token_stream import ABANDONED

_ABANDONED = (
    "The client left and did not return in time, so the answer ends here. For a whole one, send the"
    " request again, with a new Idempotency-Key or none."
)


class Suspended(Exception):
    """The answer ends in this process only: another one is to continue it."""


class EngineRun:
    """The engine's answer to one prompt. An async context manager that is entered once."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        entry: JournalEntry,
        session: SafetySession,
        ticket: Ticket,
        trace: Trace,
        lease: Lease,
        allowance: Allowance | None,
        prefixes: PrefixReport,
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._entry = entry
        self._stream = entry.stream
        self._session = session
        self._trace = trace
        self._lease = lease
        self._allowance = allowance
        self._prefixes = prefixes
        self._rid = session.rid
        self._opening: asyncio.Task[None] | None = None
        self._screen: AnswerScreen | None = None
        self._sent_s = 0.0
        self.exhausted: Lease | Allowance | None = None
        """The limit that ended the answer: its key's tokens a minute, or its month's money."""
        self.has_allowance = allowance is not None
        """True if `charge` has to be called."""
        # Looked up once: `counted` is called for every token.
        self._on_ticket, self._on_trace, self._on_entry = ticket.on_delta, trace.record, entry.generated
        self._metered = lease.metered
        self._has_unbilled = prompt.unbilled_tokens > 0
        self._progress = entry.suspended_progress if entry.suspended_progress.counts else None
        """None if nothing was generated before. A continued answer's tokens are handed over again."""

    async def __aenter__(self) -> Self:
        """Start the engine. The status line is sent now where the prompt is judged, else with its verdict.

        Raises what `Engine.generate` and `TokenStream.open` do.
        """
        self._session.start_full_screen()
        if self._session.undecided:
            self._opening = asyncio.create_task(self._open_when_judged(), name=f"verdict-{self._rid}")
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        else:
            self._open()
        self._sent_s = time.monotonic()
        self.deltas: AsyncIterator[Delta] = self._engine.generate(self._rid, self._prompt)
        self._stream.on_cancel(partial(self._engine.abort, self._rid))
        if self._opening is None:  # the screen of the answer is made while the engine reads the prompt
            asyncio.get_running_loop().call_soon(self._open_screen)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, exc: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Release the engine, and the harmless part of the held text of an interrupted answer."""
        try:
            if isinstance(exc, ScreenFailed):
                await self._read_engine_to_end()
            elif exc is not None and not isinstance(exc, Suspended):
                self._engine.abort(self._rid)  # ignored where the engine has failed or ended
                if isinstance(exc, ServingError):  # no defect, and the task is not cancelled
                    self._release_harmless()
        finally:
            if self._opening is not None:
                self._opening.cancel()  # what has ended by now must not be opened
            self._entry.add_emitted(self._engine.pop_emitted_tokens(self._rid))

    def counted(self, delta: Delta) -> Delta | None:
        """Note a delta in ticket, trace and limits. Returns it as billed.

        If the server stops, the aborted choice's last delta is not released: the result is None.
        """
        self._on_ticket(delta)
        self._on_entry(delta)
        if self._has_unbilled:
            delta = delta._replace(counts=self._prompt.as_billed(delta.counts))
        if self._progress is not None:
            delta = self._progress.with_earlier_prompt(delta)
        if self._progress is None or self._progress.is_reached(delta):
            self._on_trace(delta)
            if self._metered and self._lease.on_delta(delta.choice, delta.counts.completion_tokens):
                self.exhausted = self.exhausted or self._lease
        if delta.finish_reason == "abort" and self._stream.suspending:
            return None
        return delta

    def charge(self) -> bool:
        """Charge the budget for what is released by now. Returns whether it is used up."""
        allowance, entry = self._allowance, self._entry
        if allowance is not None and allowance.note_usage(entry.usage(), entry.terms.price):
            self.exhausted = allowance
            return True
        return False

    async def wait_until_releasable(self, first: Delta) -> AnswerScreen:
        """Wait for the verdict and the reservation, before the first release; returns the answer's screen.

        The stream is opened elsewhere: in `__aenter__`, or in `_open_when_judged`.

        Raises ContentFiltered, ScreenFailed (the prompt's verdict), StorageUnavailable, NotFound (the
        reservation), Cancelled and Draining (it is no longer wanted).
        """
        try:
            if self._opening is not None:
                await self._opening
            await self._entry.committed()
        except ServingError:
            await self._read_engine_to_end()
            raise
        request, key_id = self._entry.turn.request, self._entry.key_id
        salt, counts = request.placement.cache_salt, first.counts
        self._prefixes.record(request, self._prompt, counts, self._sent_s, key_id=key_id, salt=salt)
        return self._open_screen()

    async def end(self, screen: AnswerScreen | None) -> Outcome:
        """Decide which end the answer has, and finish its open choices.

        If several ends apply, the first of these counts: halt, limit, server stop, cancellation. The engine
        is stopped where a screen or a limit ended the answer.

        Held tokens, and those that the engine makes until it has stopped, are withheld and not billed.

        Raises Suspended, or Draining before the status line is out, where the server stops first.
        """
        trace, stream = self._trace, self._stream
        if screen is not None and screen.halted is not None:
            await self._read_engine_to_end()
            self._finish_choices("content_filter")
            outcome = Outcome.HALTED
        elif self.exhausted is not None:
            await self._read_engine_to_end()
            if self._finish_choices("length"):
                stream.extra_chunk("budget", self.exhausted.as_notice())
            outcome = Outcome.CANCELLED if trace.stopped else Outcome.BUDGET
        elif stream.suspending and trace.unfinished:
            if stream.status_unsent:
                stream.check_not_stopping()
            raise Suspended
        else:
            self._entry.read_to_end()
            outcome = Outcome.CANCELLED if trace.stopped else Outcome.DONE
            if trace.stopped and stream.cancelled == ABANDONED:  # for a client that asks for it later
                stream.extra_chunk("abandoned", {"message": _ABANDONED})
        self._entry.end(outcome)
        return outcome

    async def _open_when_judged(self) -> None:
        """Let the status line out once the prompt is judged; stop the engine where it is refused."""
        try:
            await self._session.await_verdict()
            self._open()
            self._open_screen()
        except ServingError as error:
            self._engine.abort(self._rid)
            if isinstance(error, ContentFiltered):
                self._entry.end(Outcome.HALTED)
            raise

    def _open(self) -> None:
        self._stream.open(self._entry.turn.request.n)

    def _open_screen(self) -> AnswerScreen:
        if self._screen is None:
            self._screen = self._session.open_screen()
            if self._progress is not None:
                self._screen = SkipReleased(self._screen, self._stream.in_ring(), self._progress.released)
        return self._screen

    async def _read_engine_to_end(self) -> None:
        """Abort the engine and read on to its final deltas."""
        self._engine.abort(self._rid)
        with contextlib.suppress(ServingError):  # the request ends for another reason already
            async for delta in self.deltas:
                self.counted(delta)
            self._entry.read_to_end()

    def _finish_choices(self, reason: FinishReason) -> bool:
        """Finish the open choices. Returns whether there were any."""
        unfinished = self._trace.unfinished
        for choice in unfinished:
            last = Delta(choice, "text", "", (), self._entry.released_counts(choice), reason)
            self._trace.record_finish(last)
            self._stream.append(last)
        return bool(unfinished)

    def _release_harmless(self) -> None:
        if self._screen is None:
            return
        for released in self._screen.take_releasable():
            self._entry.released(released)
            self._stream.append(released)
