"""One prompt in the engine: sent, cleared for release, stopped early if a screen or a limit says so.

    enter ──▶ deltas, each `counted` ──▶ `cleared` before the first release ──▶ `end` ──▶ exit

The engine reads the prompt while the full verdict on it is made and the reservation is written. The
status line goes out with the verdict; the first token needs the reservation too.
An early stop aborts the engine first and then reads on: its final deltas have the true counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

from app.admission.ticket import Ticket
from app.core import ChatRequest, Delta, Engine, FinishReason, Key, Prompt
from app.errors import ContentFiltered, ServingError
from app.journal.entry import JournalEntry, Outcome
from app.metering.budget import Allowance
from app.metering.limiter import Lease
from app.pipeline.trace import Trace
from app.prefix_report.report import PrefixReport
from app.resume.skip_released import SkipReleased
from app.safety.session.session import AnswerScreen, SafetySession
from app.safety.verdict import ScreenFailed
from app.stream.token_stream import ABANDONED, TokenStream

_ABANDONED = (
    "The client left and did not come back in time, so the answer ends here. For a whole one, send the"
    " request again, with a new Idempotency-Key or none."
)


class Suspended(Exception):
    """The answer ends in this process only: another one is to continue it."""


@dataclass(frozen=True, slots=True)
class GenerationContext:
    """One admitted and reserved request. `request` has its conversation's messages in front."""

    request: ChatRequest
    key: Key | None
    stream: TokenStream
    trace: Trace
    ticket: Ticket
    entry: JournalEntry
    session: SafetySession


class SpendingLimits:
    """The limits at which an answer ends: its key's tokens a minute, and its month's money.

    `reached` is the first of them that was.
    """

    def __init__(self, lease: Lease, allowance: Allowance | None) -> None:
        self.metered = lease.metered
        """Whether `on_generated` has to be called."""
        self.budgeted = allowance is not None
        """Whether `on_released` has to be called."""
        self._lease = lease
        self._allowance = allowance
        self.reached: Lease | Allowance | None = None

    def on_generated(self, delta: Delta) -> None:
        """Charge the key's tokens for what the engine has made of a choice."""
        if self._lease.on_delta(delta.choice, delta.counts.completion_tokens) and self.reached is None:
            self.reached = self._lease

    def on_released(self, entry: JournalEntry) -> bool:
        """Charge the budget for what is released by now. Returns whether it is used up."""
        allowance = self._allowance
        if allowance is None or not allowance.spent_up(entry.usage(), entry.terms.price):
            return False
        self.reached = allowance
        return True


class EngineRun:
    """The engine's answer to one prompt. An async context manager that is entered once."""

    def __init__(
        self,
        engine: Engine,
        prompt: Prompt,
        context: GenerationContext,
        limits: SpendingLimits,
        *,
        prefixes: PrefixReport,
    ) -> None:
        self._engine = engine
        self._prompt = prompt
        self._context = context
        self._limits = limits
        self._prefixes = prefixes
        self._rid = context.session.rid
        self._opening: asyncio.Task[None] | None = None
        self._screen: AnswerScreen | None = None
        self._sent_s = 0.0
        # Looked up once: `counted` is called for every token.
        self._on_ticket, self._on_trace = context.ticket.on_delta, context.trace.saw
        self._on_entry = context.entry.generated
        self._has_unbilled = prompt.unbilled_tokens > 0
        self._progress = context.entry.earlier if context.entry.earlier.counts else None
        """None where nothing is handed over once more."""

    async def __aenter__(self) -> Self:
        """Ask the engine. The status line goes out now where the prompt is judged, else with its verdict.

        Raises what `Engine.generate` and `TokenStream.open` do.
        """
        session, stream = self._context.session, self._context.stream
        session.start_full_screen()
        if session.undecided:
            self._opening = asyncio.create_task(self._open_when_judged(), name=f"verdict-{self._rid}")
            self._opening.add_done_callback(lambda task: task.cancelled() or task.exception())
        else:
            stream.open(self._context.request.n)
        self._sent_s = time.monotonic()
        self.deltas: AsyncIterator[Delta] = self._engine.generate(self._rid, self._prompt)
        stream.on_cancel(partial(self._engine.abort, self._rid))
        if self._opening is None:  # the screen of the answer is made while the engine reads the prompt
            asyncio.get_running_loop().call_soon(self._open_screen)
        return self

    async def __aexit__(
        self, _kind: type[BaseException] | None, exc: BaseException | None, _trace: TracebackType | None
    ) -> None:
        """Release the engine, and the harmless part of what an answer that broke off had held back."""
        try:
            if isinstance(exc, ScreenFailed):
                await self._drain_engine()
            elif isinstance(exc, ServingError):
                self._release_harmless()
        finally:
            if self._opening is not None:
                self._opening.cancel()  # what has ended by now must not be opened
            self._context.entry.add_emitted(self._engine.emitted_tokens(self._rid))

    def counted(self, delta: Delta) -> Delta | None:
        """Note a delta in ticket, trace and limits. Returns it as billed.

        None where it belongs to a suspended choice, whose last tokens are not released.
        """
        self._on_ticket(delta)
        self._on_entry(delta)
        if self._has_unbilled:
            delta = delta._replace(counts=self._prompt.as_billed(delta.counts))
        if self._progress is not None:
            delta = self._progress.with_earlier_prompt(delta)
        if self._progress is None or self._progress.is_reached(delta):
            self._on_trace(delta)
            if self._limits.metered:
                self._limits.on_generated(delta)
        if delta.finish_reason == "abort" and self._context.stream.suspending:
            return None
        return delta

    async def cleared(self, first: Delta) -> AnswerScreen:
        """Wait for all that the first release needs; returns the screen of the answer.

        Raises ContentFiltered, ScreenFailed (the prompt's verdict), StorageUnavailable, NotFound (the
        reservation), Cancelled and Draining (it is no longer wanted).
        """
        try:
            if self._opening is not None:
                await self._opening
            await self._context.entry.committed()
        except ServingError:
            await self._drain_engine()
            raise
        context, key = self._context, self._context.key
        self._prefixes.saw(
            context.request,
            self._prompt,
            first.counts,
            self._sent_s,
            key_id=None if key is None else key.id,
            salt=context.request.placement.cache_salt,
        )
        return self._open_screen()

    async def end(self, screen: AnswerScreen | None) -> Outcome:
        """Stop the engine where a screen or a limit ended the answer, and finish open choices.

        Raises Suspended, or Draining before the status line is out, where the server stops first.
        """
        entry, trace, stream = self._context.entry, self._context.trace, self._context.stream
        if screen is not None and screen.halted is not None:
            await self._stop_blocked()
            outcome = Outcome.HALTED
        elif self._limits.reached is not None:
            await self._stop_at_budget(self._limits.reached.as_notice())
            outcome = Outcome.CANCELLED if trace.stopped else Outcome.BUDGET
        elif stream.suspending and trace.unfinished:
            if stream.pending:
                stream.check_not_cut()
            raise Suspended
        else:
            entry.read_to_end()
            outcome = Outcome.CANCELLED if trace.stopped else Outcome.DONE
            if trace.stopped and stream.cancelled == ABANDONED:  # for a client that asks for it later
                stream.notice("abandoned", {"message": _ABANDONED})
        entry.end(outcome)
        return outcome

    async def _open_when_judged(self) -> None:
        """Let the status line out once the prompt is judged; stop the engine where it is refused."""
        try:
            await self._context.session.await_verdict()
            self._context.stream.open(self._context.request.n)
            self._open_screen()
        except ServingError as error:
            self._engine.abort(self._rid)
            if isinstance(error, ContentFiltered):
                self._context.entry.end(Outcome.HALTED)
            raise

    def _open_screen(self) -> AnswerScreen:
        if self._screen is None:
            self._screen = self._context.session.open_screen()
            if self._progress is not None:
                held = self._context.stream.held()
                self._screen = SkipReleased(self._screen, held, self._progress.released)
        return self._screen

    async def _stop_blocked(self) -> None:
        """End every choice where it is. Held tokens, and those that the engine still makes, are withheld."""
        await self._drain_engine()
        self._finish_choices("content_filter")

    async def _stop_at_budget(self, notice: dict[str, str]) -> None:
        """End at the token that was released last. Later tokens are withheld and not billed."""
        await self._drain_engine()
        if self._finish_choices("length"):
            self._context.stream.notice("budget", notice)

    async def _drain_engine(self) -> None:
        """Abort the engine and read on to its final deltas."""
        self._engine.abort(self._rid)
        with contextlib.suppress(ServingError):  # the request ends for another reason already
            async for delta in self.deltas:
                self.counted(delta)
            self._context.entry.read_to_end()

    def _finish_choices(self, reason: FinishReason) -> bool:
        """Finish the open choices. Returns whether there were any."""
        context = self._context
        unfinished = context.trace.unfinished
        for choice in unfinished:
            last = Delta(choice, "text", "", (), context.entry.released_counts(choice), reason)
            context.trace.finished(last)
            context.stream.append(last)
        return bool(unfinished)

    def _release_harmless(self) -> None:
        if self._screen is None:
            return
        for released in self._screen.drain():
            self._context.entry.released(released)
            self._context.stream.append(released)
