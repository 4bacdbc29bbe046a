"""One request's tokens on their way from the engine to its stream. There is no other way.

    engine.generate -> (the prompt's verdict, the reservation) -> way out -> entry, stream

A halt aborts the engine first, reads on to the true counts, and then ends every choice.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable

from app.admission.ticket import Ticket
from app.core import Counts, Delta, Engine, FinishReason, Prompt
from app.errors import ContentFiltered, ServingError
from app.generation.journal_entry import Entry
from app.generation.safety_check import Check
from app.generation.trace import Trace
from app.metering.budget import Allowance
from app.metering.limiter import UNLIMITED, Lease
from app.safety.screens.fail_closed import WayOut
from app.safety.verdict import ScreenFailed
from app.stream.token_stream import TokenStream

OnCached = Callable[[Prompt, Counts, float], None]
"""Told of a prompt, its cached tokens as billed, and when the engine was asked (monotonic)."""


class Release:
    """Generates one answer, and releases what may be released of it."""

    def __init__(
        self,
        engine: Engine,
        check: Check,
        stream: TokenStream,
        trace: Trace,
        entry: Entry,
        ticket: Ticket,
        allowance: Allowance | None,
        lease: Lease = UNLIMITED,
        cached: OnCached = lambda _prompt, _counts, _asked_s: None,
    ) -> None:
        self._engine = engine
        self._check = check
        self._stream = stream
        self._trace = trace
        self._entry = entry
        self._ticket = ticket
        self._allowance = allowance
        self._lease = lease
        self._cached = cached
        self._asked_s = 0.0
        self._admission: asyncio.Task[None] | None = None
        self._laid = self._no_way = False
        self.way: WayOut | None = None
        """What the answer goes through, once it does."""

    async def run(self, prompt: Prompt) -> bool:
        """Generate to the end, whichever it is; False where the prompt is to be rendered anew first.

        The status line goes out when the prompt is judged, which is awaited beside the prefill.
        Raises what the engine and the screens raise; what was generated is accounted for then too.
        """
        check, engine, rid = self._check, self._engine, self._check.rid
        check.read()  # which it does when this waits for the engine
        if check.undecided:
            self._admission = asyncio.create_task(self._admit(), name=f"admission-{rid}")
            self._admission.add_done_callback(lambda task: task.cancelled() or task.exception())
        elif self._stream.pending:
            await self._admit()
            if check.begins_anew:
                return False
        self._entry.read_whole = False
        self._asked_s = time.monotonic()
        deltas = engine.generate(rid, prompt)
        self._stream.on_cancel(lambda: engine.abort(rid))
        if self._admission is None:  # judged, so the way out can be laid while the engine reads the prompt
            asyncio.get_running_loop().call_soon(self._lay)
        try:
            return await self._read(deltas, prompt)
        except ScreenFailed:
            engine.abort(rid)
            await self._read_on(deltas, prompt)
            raise
        except ServingError:
            self._drain()
            raise
        finally:
            if self._admission is not None:
                self._admission.cancel()  # what has ended by now must not be opened
            self._entry.emitted_tokens += engine.emitted_tokens(rid)

    async def _admit(self) -> None:
        """Let the status line out once the prompt is judged; else stop what has begun."""
        rid = self._check.rid
        try:
            await self._check.verdict()
            self._stream.open(self._stream.request.n)
            if self._admission is not None:  # the engine is at it
                self._lay()
        except ServingError as error:
            self._engine.abort(rid)
            self._entry.blocked = isinstance(error, ContentFiltered)
            raise

    async def _read(self, deltas: AsyncIterator[Delta], prompt: Prompt) -> bool:
        trace, entry, stream, allowance = self._trace, self._entry, self._stream, self._allowance
        lease = self._lease if self._lease.metered else None
        unbilled = prompt.unbilled_tokens > 0
        saw = self._ticket.on_delta
        cleared, way = False, None
        async for delta in deltas:
            saw(delta)
            if unbilled:
                delta = _billed(delta, prompt)  # noqa: PLW2901  # as everything from here on sees it
            trace.saw(delta)
            used_up = lease is not None and lease.on_delta(delta.choice, delta.counts.completion_tokens)
            if not cleared:
                if not await self._cleared(deltas, prompt):
                    return False
                cleared, way = True, self._begin_release()
                self._cached(prompt, delta.counts, self._asked_s)
            for released in (delta,) if way is None else way.feed(delta):
                if released.finish_reason is not None:
                    trace.finished(released)
                entry.released(released)
                stream.append(released)
                if allowance is not None and allowance.spent_up(entry.usage(), entry.price):
                    await self._cut(deltas, prompt, allowance)
                    return True
            if way is not None and way.halted is not None:
                await self._halt(deltas, prompt)
            elif used_up:
                await self._cut(deltas, prompt, self._lease)
                return True
        entry.read_whole = True
        entry.ended_by_itself = not trace.stopped
        return True

    async def _cleared(self, deltas: AsyncIterator[Delta], prompt: Prompt) -> bool:
        """Wait for all that the first release waits for; False where it is given up for another attempt."""
        try:
            if self._admission is not None:
                await self._admission
            await self._entry.committed()
        except ServingError:
            self._engine.abort(self._check.rid)
            await self._read_on(deltas, prompt)
            raise
        if not self._check.begins_anew:
            return True
        self._engine.abort(self._check.rid)
        await self._read_on(deltas, prompt)
        self._entry.begin_anew(self._trace.counts)
        self._check.again()
        return False

    def _lay(self) -> None:
        """Lay the way out, unless it is laid."""
        if not self._laid:
            self._laid = True
            try:
                self.way = self._check.way_out()
            except ScreenFailed:  # which the way out has counted and logged
                self._no_way = True
            except Exception as exc:  # noqa: BLE001  # whatever it is, it is told when something is to go out
                self._no_way = True
                with contextlib.suppress(Exception):  # nothing goes out in any case
                    self._check.broke(exc)

    def _begin_release(self) -> WayOut | None:
        """The way out; None for nothing to go through. Raises ScreenFailed."""
        self._lay()
        if self._no_way:
            raise ScreenFailed
        return self.way

    async def _halt(self, deltas: AsyncIterator[Delta], prompt: Prompt) -> None:
        """End every choice where it is; what is held, and what the engine still makes, is withheld."""
        self._engine.abort(self._check.rid)
        self._entry.blocked = True
        await self._read_on(deltas, prompt)
        self._end("content_filter")

    async def _cut(self, deltas: AsyncIterator[Delta], prompt: Prompt, spent: Allowance | Lease) -> None:
        """End at the token that was released last; what the engine made beyond it is withheld, not billed."""
        self._engine.abort(self._check.rid)
        await self._read_on(deltas, prompt)
        if self._end("length"):
            self._stream.notice("budget", spent.as_notice())
        self._entry.ended_by_itself = not self._trace.stopped

    async def _read_on(self, deltas: AsyncIterator[Delta], prompt: Prompt) -> None:
        """Read an aborted generation to its final deltas, which have the true counts."""
        with contextlib.suppress(ServingError):  # the request ends for another reason already
            async for delta in deltas:
                self._ticket.on_delta(delta)
                self._trace.saw(_billed(delta, prompt))
                self._lease.on_delta(delta.choice, delta.counts.completion_tokens)
            self._entry.read_whole = True

    def _end(self, reason: FinishReason) -> bool:
        """Finish the choices that have not; whether there were any."""
        unfinished = self._trace.unfinished
        for choice in unfinished:
            last = Delta(choice, "text", "", (), self._entry.released_counts(choice), reason)
            self._trace.finished(last)
            self._stream.append(last)
        return bool(unfinished)

    def _drain(self) -> None:
        """Release what an answer that broke off had been held back of, as far as it is harmless."""
        if self.way is None:
            return
        for released in self.way.drain():
            self._entry.released(released)
            self._stream.append(released)


def _billed(delta: Delta, prompt: Prompt) -> Delta:
    if not prompt.unbilled_tokens:
        return delta
    return delta._replace(counts=prompt.as_billed(delta.counts))
