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
from functools import partial
from types import TracebackType
from typing import Self

from app.core import Delta, Engine, FinishReason, Prompt
from app.errors import ContentFiltered, ServingError
from app.generation.context import GenerationContext
from app.generation.journal_entry import Outcome
from app.generation.progress import ReleasedBefore
from app.generation.request_safety import AnswerScreen
from app.generation.spending import SpendingLimits
from app.prefix_report.report import PrefixReport
from app.safety.verdict import ScreenFailed
from app.stream.token_stream import ABANDONED

_ABANDONED = (
    "The client left and did not come back in time, so the answer ends here. For a whole one, send the"
    " request again, with a new Idempotency-Key or none."
)


class Suspended(Exception):
    """The answer ends here only in this process: another one is to go on with it."""


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
        self._rid = context.check.rid
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
        check, stream = self._context.check, self._context.stream
        check.start_full_screen()
        if check.undecided:
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
        """Let go of the engine. What an answer that broke off had held back is released if it is harmless."""
        try:
            if isinstance(exc, ScreenFailed):
                await self._drain_engine()
            elif isinstance(exc, ServingError):
                self._release_harmless()
        finally:
            if self._opening is not None:
                self._opening.cancel()  # what has ended by now must not be opened
            self._context.entry.add_emitted(self._engine.pop_emitted_tokens(self._rid))

    def counted(self, delta: Delta) -> Delta | None:
        """The delta as billed, once ticket, trace and limits have taken note of it.

        None where its choice ends in this process only: its last tokens are not released then.
        """
        self._on_ticket(delta)
        self._on_entry(delta)
        if self._has_unbilled:
            delta = delta._replace(counts=self._prompt.as_billed(delta.counts))
        if self._progress is not None:
            delta = self._progress.as_before(delta)
        if self._progress is None or self._progress.is_news(delta):
            self._on_trace(delta)
            if self._limits.metered:
                self._limits.on_generated(delta)
        if delta.finish_reason == "abort" and self._context.stream.suspending:
            return None
        return delta

    async def cleared(self, first: Delta) -> AnswerScreen:
        """Wait for all that the first release waits for; returns the screen of the answer.

        Raises ContentFiltered, ScreenFailed (the prompt's verdict), StorageUnavailable, NotFound (the
        reservation), Cancelled and Draining (nobody wants it any more).
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
            if trace.stopped and stream.cancelled == ABANDONED:  # told to who asks for it later
                stream.notice("abandoned", {"message": _ABANDONED})
        entry.end(outcome)
        return outcome

    async def _open_when_judged(self) -> None:
        """Let the status line out once the prompt is judged; else stop what has begun."""
        try:
            await self._context.check.await_verdict()
            self._context.stream.open(self._context.request.n)
            self._open_screen()
        except ServingError as error:
            self._engine.abort(self._rid)
            if isinstance(error, ContentFiltered):
                self._context.entry.end(Outcome.HALTED)
            raise

    def _open_screen(self) -> AnswerScreen:
        if self._screen is None:
            self._screen = self._context.check.open_screen()
            if self._progress is not None:
                held = self._context.stream.held()
                self._screen = ReleasedBefore(self._screen, held, self._progress.released)
        return self._screen

    async def _stop_blocked(self) -> None:
        """End every choice where it is; what is held, and what the engine still makes, is withheld."""
        await self._drain_engine()
        self._finish_choices("content_filter")

    async def _stop_at_budget(self, notice: dict[str, str]) -> None:
        """End at the token that was released last; what the engine made beyond it is withheld, not billed."""
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
        """Finish the choices that have not; whether there were any."""
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
