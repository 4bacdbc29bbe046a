"""The suspended requests: those that this process suspends, and those that it has yet to continue.

    live ──(Runtime.drain)──▶ suspended ──(a client returns)──▶ continued: as any live request
                                  └──(see the table)──▶ settled

    settled by                       | a suspended request
    Suspensions.expire               | that no client resumed in time
    Suspensions.settle_conversation  | whose conversation was deleted
    ContinuedStreams.find_or_continue            | that this version cannot read, or with damaged events
    ContinuedStreams._continue       | whose key was revoked or has expired
    ContinuedStart.fail              | that is refused, as its model is gone, or cancelled

`ContinuedStreams` (app.intake.continued_streams) finds a request for a client that returns, and
`ContinuedStart` (app.resume.continue_answer) begins its answer in `Pipeline.serve`.
`Runtime.drain` cancels what is live as suspended, and each request's `Finalizer` (app.pipeline.finalize)
calls `suspend_later`. If the regenerated text differs from the released text, the answer ends:
app.resume.skip_released.
At a stop an answer is suspended if its status line is out and it is unfinished after `drain_timeout_s`,
unless `suspend_timeout_s` is 0. What only waits is refused. What was not continued stays suspended.
A request is settled at the counts that were released. The deadline counts from the start of this process,
because no client could return before. If a full server refuses a returning client, the deadline starts anew.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from structlog.typing import FilteringBoundLogger

from app.core import Counts, Prompt
from app.errors import Conflict, Draining, NotFound, ServingError, StorageUnavailable
from app.journal.entry import JournalEntry
from app.journal.journal import Journal, OnSettled
from app.journal.reconcile import settle_open
from app.log import safe_traceback
from app.resume.snapshot import NotReadable, SuspendedRequest, pack, unpack
from app.store import checkpoints, events, ledger, suspensions
from app.store.batch import Unit
from app.store.checkpoints import Checkpoint
from app.store.conversations import Status
from app.store.database import Database
from app.store.events import StoredStream
from app.store.ledger import cost_micro_usd
from app.stream.token_stream import TokenStream

PERIOD_S = 1.0
"""Seconds between two looks at what has expired."""


class Suspensions:
    """The suspended requests of the store, by id."""

    def __init__(
        self,
        database: Database,
        journal: Journal,
        log: FilteringBoundLogger,
        timeout_s: float,
        *,
        is_live: Callable[[str], bool],
        on_settled: OnSettled = lambda _owner, _day, _request_id, _cost: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """They may be asked for within `timeout_s`. `is_live` is whether this process continues that id."""
        self._database = database
        self._journal = journal
        self._log = log
        self._timeout_s = timeout_s
        self._is_live = is_live
        self._on_settled = on_settled
        self._clock_s = clock_s
        self._seqs: dict[str, int] = {}
        self._touched_s: dict[str, float] = {}
        """When a request was read, asked for, or suspended by this process."""
        self._suspending: set[asyncio.Task[None]] = set()
        self._num_suspended = 0
        self.num_continued = 0
        """Requests that this process has continued."""
        self.num_expired = 0
        """Requests settled because no client resumed them in time."""

    def __len__(self) -> int:
        return len(self._seqs)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._seqs

    async def open(self) -> None:
        """Read which there are; the store is open. Raises StorageUnavailable."""
        self._seqs = await self._database.read(suspensions.ids)
        self._touched_s = dict.fromkeys(self._seqs, self._clock_s())

    # A request of this process is suspended

    def suspend_later(self, entry: JournalEntry, safety: Mapping[str, Any], error: ServingError) -> None:
        """Store a stream so that it can be continued, then cut its readers; `drained` waits for it.

        `safety` is the state of its session. A client that waits for the whole answer gets `error`. A stream
        that cannot be stored ends in an error, and is settled.
        """
        self._journal.remove(entry)
        suspending = self._suspend(entry, safety, error)
        task = asyncio.create_task(suspending, name=f"suspend-{entry.stream.request_id}")
        self._suspending.add(task)
        task.add_done_callback(self._suspending.discard)

    async def _suspend(self, entry: JournalEntry, safety: Mapping[str, Any], error: ServingError) -> None:
        stream = entry.stream
        try:
            await entry.committed()
            assert entry.request_seq is not None
            await self._database.write(_suspension_of(entry, entry.request_seq, safety))
        except Exception as exc:  # noqa: BLE001  # any error: the client gets a truthful end
            self._log.error("not_suspended", request_id=stream.request_id, error=safe_traceback(exc))
            stream.fail(Draining("The server stopped before the answer was complete; ask again."))
            self._journal.settle_later(entry, Draining.default_code)
        else:
            self._num_suspended += 1
            self._seqs[stream.request_id] = entry.request_seq
            self.extend_deadline(stream.request_id)
            stream.suspend(error)

    async def drained(self) -> None:
        """Wait until all streams that are being suspended are."""
        while self._suspending:
            await asyncio.wait(self._suspending)
        if self._num_suspended:
            hint = "the next process continues them, if their clients return"
            self._log.info("suspended", streams=self._num_suspended, hint=hint)

    # A request of an earlier process is continued

    async def load(self, owner: str, request_id: str) -> tuple[StoredStream, SuspendedRequest | None] | None:
        """The owner's suspended request and its stream; None where there is none of that id.

        The request is None where this version cannot read it. Raises StorageUnavailable.
        """
        if request_id not in self._seqs:
            return None
        stored = await self._database.read(lambda c: suspensions.load(c, request_id, owner))
        if stored is None:
            return None
        try:
            return stored.stream, await asyncio.to_thread(unpack, stored)
        except NotReadable as exc:
            self._log.error("suspended_unreadable", request_id=request_id, error=safe_traceback(exc))
            return stored.stream, None

    def extend_deadline(self, request_id: str) -> None:
        """Begin a suspended request's time again, as a client waits for it."""
        if request_id in self._seqs:  # it may have been settled meanwhile
            self._touched_s[request_id] = self._clock_s()

    def continue_(
        self, suspended: SuspendedRequest, prompt: Prompt, stream: TokenStream, counts: Mapping[int, Counts]
    ) -> JournalEntry:
        """The entry of a suspended request: from here on its row is that of any live request.

        Raises StorageUnavailable where the store is closed.
        """
        request_seq = suspended.request_seq

        def unit(connection: sqlite3.Connection) -> int:
            suspensions.take(connection, request_seq)
            if ledger.unsettled_request(connection, request_seq) is None:
                raise NotFound("The stream has ended.", code="stream_not_found")
            return request_seq

        entry = JournalEntry(
            suspended.turn,
            prompt,
            stream,
            counts,
            reserved=self._database.submit(unit),
            terms=suspended.terms,
            key_id=suspended.key_id,
            progress=suspended.progress,
        )
        entry.saved(stream.last_id)
        self._journal.insert(entry)
        self._seqs.pop(stream.request_id, None)
        self._touched_s.pop(stream.request_id, None)
        self.num_continued += 1
        self._database.text_deleted.set()
        return entry

    # A request that no client resumes is settled

    async def run(self) -> None:
        """Settle what has expired, until cancelled."""
        while True:
            try:
                await self.expire()
            except StorageUnavailable as exc:
                self._log.warning("suspended_not_settled", error=exc.code)
            except Exception as exc:  # noqa: BLE001  # those that expire later must be settled
                self._log.error("suspensions_broke", error=safe_traceback(exc))
            await asyncio.sleep(PERIOD_S)

    async def expire(self) -> int:
        """Settle requests that no client resumed in time; returns how many. Raises StorageUnavailable."""
        begun_s = self._clock_s() - self._timeout_s
        expired = [i for i in self._seqs if self._touched_s[i] <= begun_s and not self._is_live(i)]
        await self.settle(expired)
        if expired:
            self.num_expired += len(expired)
            hint = "no client resumed these streams after the restart"
            self._log.info("suspended_expired", requests=len(expired), hint=hint)
        return len(expired)

    async def settle(
        self, request_ids: Sequence[str], finish: str = "interrupted", status: Status = "interrupted"
    ) -> None:
        """Settle requests at what was released of them. Raises StorageUnavailable."""
        seqs = {
            request_id: self._seqs.pop(request_id) for request_id in request_ids if request_id in self._seqs
        }
        if not seqs:
            return

        def unit(connection: sqlite3.Connection) -> list[tuple[str, int, str, int] | None]:
            return [_settled(connection, seq, finish, status) for seq in seqs.values()]

        try:
            settlements = await self._database.write(unit)
        except StorageUnavailable:
            self._seqs.update(seqs)
            raise
        for request_id in seqs:
            self._touched_s.pop(request_id, None)
        for settlement in settlements:
            if settlement is not None:
                self._on_settled(*settlement)
        self._database.text_deleted.set()

    async def settle_conversation(self, owner: str, conversation_id: str) -> None:
        """Settle what is suspended in a conversation that was deleted. Raises StorageUnavailable."""
        if self._seqs:
            request_ids = await self._database.read(
                lambda c: suspensions.of_conversation(c, owner, conversation_id)
            )
            await self.settle(request_ids, "abort", "cancelled")


def _suspension_of(entry: JournalEntry, request_seq: int, safety: Mapping[str, Any]) -> Unit[None]:
    """The unit that suspends an entry: its events and counts, and what it takes to continue.

    Raises TypeError, OverflowError for what cannot be stored; the unit raises Conflict where it has ended.
    """
    suspension = pack(request_seq, entry.key_id, entry.turn, entry.progress(), safety)
    usage, (segment, is_whole) = entry.usage(unreleased=entry.stream.unreleased), entry.unsaved()

    def suspend(connection: sqlite3.Connection) -> None:
        if not suspensions.add(connection, suspension):
            raise Conflict("The request was deleted, or has ended.")
        if is_whole:
            events.forget_segments(connection, request_seq)
        checkpoints.write(connection, [Checkpoint(request_seq, usage, *(segment or (0, b"")))])

    return suspend


def _settled(
    connection: sqlite3.Connection, seq: int, finish: str, status: Status
) -> tuple[str, int, str, int] | None:
    """Settle a request if it is open; the arguments of OnSettled."""
    left, terms = ledger.unsettled_request(connection, seq), ledger.terms_of(connection, seq)
    if left is None or terms is None:
        return None
    settle_open(connection, left, finish, status)
    return left.owner, terms.day, left.id, cost_micro_usd(left.usage, terms.price)
