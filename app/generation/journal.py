"""What outlives the process: each request's reservation, checkpoints and settlement.

    reserve ──(queued with the prefill)──▶ durable ──▶ checkpoint, once a second ──▶ settle

The reservation is committed before the first token is released, with the turn's messages. Live
streams are checkpointed together, events and counts in one transaction. The answer and its
settlement are one unit. A unit that could not be written is kept and tried again; what a dead
process left open is settled at its checkpoint by `reconcile`.
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from structlog.typing import FilteringBoundLogger

from app.core import ChatRequest, Counts, Key, Prompt
from app.errors import Draining, NotFound, ServingError, StorageUnavailable
from app.generation.history import LoadedTurn
from app.generation.journal_entry import JournalEntry, stream_facts
from app.generation.open_requests import settle_open
from app.generation.retention import Retention
from app.generation.settlement import settlement_of, suspension_of
from app.generation.suspended import SuspendedRequest
from app.log import safe_traceback
from app.metering.balance import LedgerAudit
from app.metering.pricing import PriceTable
from app.metering.traffic import Traffic
from app.store import checkpoints, conversations, events, indexing, ledger, suspensions
from app.store.batch import probe
from app.store.checkpoints import Checkpoint
from app.store.database import Database
from app.store.ledger import NO_KEY, Reservation, cost_micro_usd
from app.stream.token_stream import DELETED, STORAGE, TokenStream

CHECKPOINT_S = 1.0
PATIENCE_S = 10.0
"""How long live streams go on while nothing can be written."""
LINGER_S = 0.02
"""How long a reservation waits at most for others to be committed with."""
SWEEP_S = 5.0
AT_ONCE = 64
"""Streams that are looked at without giving way to others."""
OnSettled = Callable[[str, int, str, int], None]
"""Called with each committed settlement: owner, day, request id, cost in micro-dollars."""


class Journal:
    """All requests' entries, and the clock of their checkpoints."""

    def __init__(
        self,
        database: Database,
        prices: PriceTable,
        balance: LedgerAudit,
        traffic: Traffic,
        *,
        log: FilteringBoundLogger,
        retention_s: float,
        checkpoint_s: float = CHECKPOINT_S,
        patience_s: float = PATIENCE_S,
        on_settled: OnSettled = lambda _owner, _day, _request_id, _cost: None,
        on_suspended: Callable[[str, int], None] = lambda _request_id, _seq: None,
        is_serving: Callable[[], bool] = lambda: True,
    ) -> None:
        """`on_suspended` is called with the id and the row of a request that was suspended.

        `is_serving`: see Retention.
        """
        self._database = database
        self._prices = prices
        self._balance = balance
        self._traffic = traffic
        self._log = log
        self._retention = Retention(retention_s, is_serving)
        self._checkpoint_s = checkpoint_s
        self._patience_s = patience_s
        self._live: set[JournalEntry] = set()
        self._unsettled: dict[JournalEntry, float] = {}  # since when, in seconds; oldest first
        self._ticker: asyncio.Task[None] | None = None
        self._lead_s = 0.0  # between a reservation and its first token, lately; rises slowly
        self._written_at_s = time.monotonic()
        self._on_settled = on_settled
        self._on_suspended = on_suspended
        self._suspending: set[asyncio.Task[None]] = set()
        self.num_suspended = 0
        """Streams that this process has suspended."""

    @property
    def num_unsettled(self) -> int:
        """Ended requests whose settlement could not be written yet."""
        return len(self._unsettled)

    @property
    def unsettled_age_s(self) -> float:
        """How long the oldest of them has waited; 0 when there is none."""
        now_s = time.monotonic()
        return now_s - next(iter(self._unsettled.values()), now_s)

    @property
    def checkpoint_age_s(self) -> float:
        """How long ago everything there was to write was written."""
        return time.monotonic() - self._written_at_s

    def start(self) -> None:
        """Begin to checkpoint; needs a running loop."""
        self._ticker = asyncio.create_task(self._tick(), name="journal-ticker")

    async def aclose(self) -> None:
        """Try once more what could not be written, and stop. A second call does nothing."""
        if self._ticker is None:
            return
        self._ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticker
        self._ticker = None
        await self._settle_left()

    # One request

    async def reserve(
        self,
        turn: LoadedTurn,
        prompt: Prompt,
        stream: TokenStream,
        counts: Mapping[int, Counts],
        *,
        key: Key | None = None,
    ) -> JournalEntry:
        """Queue the reservation, and the turn's messages with it.

        It lingers for company while the prompt is prefilled. It is waited for only where the last commit
        failed, so that the refusal comes before the status line. Raises StorageUnavailable, NotFound.
        """
        key_id = None if key is None else key.id
        reservation = self._reservation(turn.request, prompt, key_id)
        stored_turn = turn.stored_turn

        def unit(connection: sqlite3.Connection) -> int:
            conversation_seq = None if stored_turn is None else conversations.ensure(connection, stored_turn)
            request_seq = ledger.reserve(connection, reservation, conversation_seq)
            if stored_turn is not None and conversation_seq is not None:
                conversations.add_turn(connection, stored_turn, conversation_seq, request_seq)
            return request_seq

        entry = JournalEntry(
            turn,
            prompt,
            stream,
            counts,
            reserved=self._database.submit(unit, linger_s=min(self._lead_s / 2, LINGER_S)),
            terms=reservation.terms,
            need=partial(self._needed, time.monotonic()),
            key_id=key_id,
        )
        if self._database.failing:
            try:
                await entry.committed()
            except BaseException:
                self.settle_later(entry, entry.finish)  # its caller has gone, and it may be committed yet
                raise
        self._live.add(entry)
        return entry

    def take_up(
        self,
        suspended: SuspendedRequest,
        turn: LoadedTurn,
        prompt: Prompt,
        stream: TokenStream,
        counts: Mapping[int, Counts],
    ) -> JournalEntry:
        """The entry of a request that was suspended: from here on its row is that of any live request."""

        def unit(connection: sqlite3.Connection) -> int:
            suspensions.take(connection, suspended.request_seq)
            if ledger.open_request(connection, suspended.request_seq) is None:
                raise NotFound("The stream has ended.", code="stream_not_found")
            return suspended.request_seq

        entry = JournalEntry(
            turn,
            prompt,
            stream,
            counts,
            reserved=self._database.submit(unit),
            terms=suspended.terms,
            key_id=suspended.key_id,
            progress=suspended.progress,
        )
        entry.begin_checkpoint()
        entry.end_checkpoint(stream.last_id)
        self._live.add(entry)
        return entry

    def suspend_later(self, entry: JournalEntry, safety: Mapping[str, Any], error: ServingError) -> None:
        """Write what it takes to go on with a stream, and then cut its readers; `suspended` waits for it.

        Where it cannot be written, the stream ends in an error, and is settled.
        """
        self._live.discard(entry)
        suspending = self._suspend(entry, safety, error)
        task = asyncio.create_task(suspending, name=f"suspend-{entry.stream.request_id}")
        self._suspending.add(task)
        task.add_done_callback(self._suspending.discard)

    async def suspended(self) -> None:
        """Wait until all streams that are being suspended are."""
        while self._suspending:
            await asyncio.wait(self._suspending)
        if self.num_suspended:
            hint = "they go on in the next process, if their clients return"
            self._log.info("suspended", streams=self.num_suspended, hint=hint)

    async def _suspend(self, entry: JournalEntry, safety: Mapping[str, Any], error: ServingError) -> None:
        stream = entry.stream
        try:
            await entry.committed()
            await self._database.write(suspension_of(entry, safety))
        except Exception as exc:  # noqa: BLE001  # whatever it is, the client gets a truthful end
            self._log.error("not_suspended", request_id=stream.request_id, error=safe_traceback(exc))
            stream.fail(Draining("The server stopped before the answer was complete; ask again."))
            self.settle_later(entry, Draining.default_code)
        else:
            self.num_suspended += 1
            self._on_suspended(stream.request_id, entry.request_seq or 0)
            stream.suspend(error)

    def _needed(self, reserved_at_s: float) -> None:
        """A reservation is waited for: how long after it was made tells how long the next may linger."""
        lead_s = time.monotonic() - reserved_at_s
        self._lead_s = min(lead_s, self._lead_s + (lead_s - self._lead_s) / 8)
        self._database.flush()

    def _reservation(self, request: ChatRequest, prompt: Prompt, key_id: str | None) -> Reservation:
        created_at_us = time.time_ns() // 1000
        key = request.idempotency
        return Reservation(
            request_id=request.request_id,
            owner=request.owner,
            model=request.model,
            created_at_us=created_at_us,
            max_tokens=prompt.max_tokens * request.n,
            prompt_tokens=prompt.billed_tokens,
            price=self._prices.price_of(request.model, created_at_us),
            stream=stream_facts(request),
            idempotency_key=None if key is None else key.key,
            fingerprint=None if key is None else key.fingerprint,
            rerendered=prompt.rerendered,
            key_id=key_id or NO_KEY,
            metadata=request.metadata,
        )

    async def settle(self, entry: JournalEntry, finish: str) -> None:
        """Write the answer and the bill, once. Raises StorageUnavailable; it is tried again later."""
        entry.finish_as(finish)
        self._live.discard(entry)
        if entry.request_seq is None:
            return  # never reserved, so nothing was released and nothing is owed
        self._unsettled[entry] = time.monotonic()
        self._close(entry, await self._database.write(settlement_of(entry)))

    def settle_later(self, entry: JournalEntry, finish: str) -> None:
        """The same, without waiting for it; nothing where it is settled."""
        entry.finish_as(finish)
        self._live.discard(entry)
        if entry.settled or entry in self._unsettled:
            return
        if entry.reserved.done():
            self._queue_settlement(entry)
        else:
            entry.reserved.add_done_callback(lambda _reserved: self._queue_settlement(entry))

    def _queue_settlement(self, entry: JournalEntry) -> None:
        if not entry.take_reserved():
            return
        self._unsettled[entry] = time.monotonic()
        with contextlib.suppress(StorageUnavailable):  # closed: the next start reconciles
            settled = self._database.submit(settlement_of(entry))
            settled.add_done_callback(lambda s: self._settled(entry, s))

    def _settled(self, entry: JournalEntry, settled: asyncio.Future[int]) -> None:
        error = None if settled.cancelled() else settled.exception()
        if error is None:
            self._close(entry, settled.result())
        elif not isinstance(error, StorageUnavailable):
            self._give_up(entry, error)

    def _give_up(self, entry: JournalEntry, error: BaseException) -> None:
        """Leave a settlement that is itself faulty to the next start, which settles at the checkpoint."""
        self._unsettled.pop(entry, None)
        self._log.error("settlement_broke", request_id=entry.stream.request_id, error=safe_traceback(error))

    # All of them, once a second

    async def _tick(self) -> None:
        swept_at_s = 0.0
        while True:
            await asyncio.sleep(self._checkpoint_s)
            try:
                await self._settle_left()
                await self._checkpoint()
                await indexing.index_all(self._database)
                if self._database.failing:
                    await self._database.write(probe)
                if time.monotonic() - swept_at_s >= SWEEP_S:
                    swept_at_s = time.monotonic()
                    await self._sweep()
            except StorageUnavailable as error:
                self._not_written(error)
            except Exception as exc:  # noqa: BLE001  # the next checkpoint must come
                self._log.error("checkpoint_broke", error=safe_traceback(exc))
            else:
                self._written_at_s = time.monotonic()

    async def _checkpoint(self) -> None:
        """Write what every live stream has said since the last time, in one unit."""
        news: list[Checkpoint] = []
        saved: dict[JournalEntry, int] = {}
        for number, entry in enumerate(list(self._live), start=1):
            if number % AT_ONCE == 0:
                await asyncio.sleep(0)  # thousands of streams: their tokens do not wait for all of them
            if entry.request_seq is None or (dumped := entry.stream.dump(entry.saved_id)) is None:
                continue
            entry.begin_checkpoint()
            news.append(Checkpoint(entry.request_seq, entry.usage(), *dumped))
            saved[entry] = entry.stream.last_id
        if not news:
            return
        await self._database.write(lambda connection: checkpoints.write(connection, news))
        for entry, last_id in saved.items():
            entry.end_checkpoint(last_id)

    async def _settle_left(self) -> None:
        for entry in list(self._unsettled):
            if entry.stream.done:
                try:
                    billed_tokens = await self._database.write(settlement_of(entry))
                except StorageUnavailable:
                    raise
                except Exception as exc:  # noqa: BLE001  # it must not hold up the others
                    self._give_up(entry, exc)
                else:
                    self._close(entry, billed_tokens)

    def _close(self, entry: JournalEntry, billed_tokens: int) -> None:
        self._unsettled.pop(entry, None)
        if not entry.settle():  # a settlement that was tried again may be committed twice
            return
        if entry.stream.cancelled == DELETED:
            self._database.text_deleted.set()
        model, usage = entry.stream.request.model, entry.usage()
        cost = cost_micro_usd(usage, entry.price)
        self._traffic.settled(model, usage, cost)
        self._on_settled(entry.terms.owner, entry.terms.day, entry.stream.request_id, cost)
        self._balance.settled(
            model,
            entry.stream.request_id,
            billed_tokens,
            entry.emitted_tokens,
            read_whole=entry.read_whole,
        )

    async def _sweep(self) -> None:
        """Forget the events of streams that nobody stored, once their retention has ended."""
        until_us = self._retention.until_us(time.monotonic(), time.time_ns() // 1000)
        num_forgotten = events.LIMIT
        while num_forgotten == events.LIMIT:
            num_forgotten = await self._database.write(lambda c: events.forget_unstored(c, until_us))
            if num_forgotten:
                self._database.text_deleted.set()

    def _not_written(self, error: StorageUnavailable) -> None:
        stuck_s = time.monotonic() - self._written_at_s
        self._log.warning("not_written", error=error.code, stuck_s=round(stuck_s, 1), live=len(self._live))
        if stuck_s >= self._patience_s:
            for entry in list(self._live):
                entry.stream.cancel(STORAGE)

    async def reconcile(self) -> int:
        """Settle what a dead process left open, at its checkpoint. Returns how many requests."""

        def unit(connection: sqlite3.Connection) -> int:
            left = ledger.open_requests(connection)
            for request in left:
                settle_open(connection, request)
            return len(left)

        return await self._database.write(unit)
