"""The records of a request that outlive the process: its reservation, checkpoints and settlement.

    reserve ──(queued with the prefill)──▶ durable ──▶ checkpoint, once a second ──▶ settle

The reservation is committed before the first token is released, with the turn's messages. Live
streams are checkpointed together, events and counts in one transaction. The answer and its
settlement are one unit. A unit that could not be written is kept and tried again; what a dead
process left open is settled at its checkpoint (app.journal.reconcile).
"""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
import time
from collections.abc import Callable, Mapping
from functools import partial

from structlog.typing import FilteringBoundLogger

from app.core import ChatRequest, Counts, Key, Prompt
from app.errors import StorageUnavailable
from app.journal.entry import JournalEntry
from app.journal.history import LoadedTurn
from app.journal.retention import Retention
from app.journal.settlement import settlement_of
from app.log import safe_traceback
from app.metering.audit import LedgerAudit
from app.metering.pricing import PriceTable
from app.metering.traffic import Traffic
from app.store import checkpoints, conversations, indexing, ledger
from app.store.batch import probe
from app.store.checkpoints import Checkpoint
from app.store.database import Database
from app.store.ledger import NO_KEY, Reservation, cost_micro_usd
from app.stream.replay import stream_facts
from app.stream.token_stream import DELETED, STORAGE, TokenStream

CHECKPOINT_S = 1.0
MAX_STORE_OUTAGE_S = 10.0
"""Seconds for which live streams continue while nothing can be written."""
LINGER_S = 0.02
"""Seconds that a reservation or a settlement waits at most for others to be committed with."""
LINGER_SHARE = 0.01
"""The share of a request's time for which its settlement, and so the end of its stream, may wait for them."""
CHECKPOINT_BATCH = 64
"""Streams that are checkpointed before the event loop serves others."""
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
        retention: Retention,
        on_settled: OnSettled = lambda _owner, _day, _request_id, _cost: None,
    ) -> None:
        self._database = database
        self._prices = prices
        self._balance = balance
        self._traffic = traffic
        self._log = log
        self._retention = retention
        self._on_settled = on_settled
        self._checkpoint_s = CHECKPOINT_S
        self._max_outage_s = MAX_STORE_OUTAGE_S
        self._live: set[JournalEntry] = set()
        self._unsettled: dict[JournalEntry, float] = {}  # since when, in seconds; oldest first
        self._settling: set[asyncio.Task[None]] = set()
        self._ticker: asyncio.Task[None] | None = None
        self._lead_s = 0.0  # between a reservation and its first token, lately; rises slowly
        self._written_at_s = time.monotonic()

    @property
    def num_unsettled(self) -> int:
        """Ended requests whose settlement could not be written yet."""
        return len(self._unsettled)

    @property
    def unsettled_age_s(self) -> float:
        """Seconds that the oldest of them has waited; 0 when there is none."""
        now_s = time.monotonic()
        return now_s - next(iter(self._unsettled.values()), now_s)

    @property
    def checkpoint_age_s(self) -> float:
        """Seconds since all that there was to write was written."""
        return time.monotonic() - self._written_at_s

    def start(self) -> None:
        """Begin to checkpoint; needs a running loop."""
        self._ticker = asyncio.create_task(self._tick(), name="journal-ticker")

    async def aclose(self) -> None:
        """Try once more what could not be written, and stop. A second call does nothing.

        Raises StorageUnavailable.
        """
        if self._ticker is None:
            return
        self._ticker.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._ticker
        self._ticker = None
        if self._settling:
            await asyncio.wait(self._settling)
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
        failed, so that the refusal precedes the status line. Raises StorageUnavailable, NotFound.
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

        reserved = self._database.submit(unit, linger_s=min(self._lead_s / 2, LINGER_S))
        commit_now = partial(self._commit_now, time.monotonic())
        entry = JournalEntry(
            turn,
            prompt,
            stream,
            counts,
            reserved=reserved,
            terms=reservation.terms,
            commit_now=commit_now,
            key_id=key_id,
        )
        if self._database.failing:
            try:
                await entry.committed()
            except BaseException:
                self.settle_later(entry, entry.finish)  # its caller has gone, and it may be committed yet
                raise
        self.insert(entry)
        return entry

    def insert(self, entry: JournalEntry) -> None:
        """Checkpoint an entry from now on, until it is settled or removed."""
        self._live.add(entry)

    def remove(self, entry: JournalEntry) -> None:
        """Checkpoint an entry no more."""
        self._live.discard(entry)

    def _commit_now(self, reserved_at_s: float) -> None:
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
        """Write the answer and the bill, once. Raises StorageUnavailable; `_settle_left` tries again."""
        entry.finish_as(finish)
        self.remove(entry)
        if entry.request_seq is not None:  # else nothing was released and nothing is owed
            now_s = self._unsettled[entry] = time.monotonic()
            await self._write(entry, min(LINGER_SHARE * (now_s - entry.begun_s), LINGER_S))

    def settle_later(self, entry: JournalEntry, finish: str) -> None:
        """Settle in a task, once the reservation is committed; no effect where it is settled."""
        entry.finish_as(finish)
        self.remove(entry)
        if not entry.settled and entry not in self._unsettled:
            name = f"settle-{entry.stream.request_id}"
            task = asyncio.create_task(self._settle_reserved(entry), name=name)
            self._settling.add(task)
            task.add_done_callback(self._settling.discard)

    async def _settle_reserved(self, entry: JournalEntry) -> None:
        try:
            await entry.committed()
        except Exception:  # noqa: BLE001  # whatever kept it from the store: there is no row to settle
            return
        self._unsettled.setdefault(entry, time.monotonic())
        with contextlib.suppress(StorageUnavailable):  # the ticker tries again, or the next start reconciles
            await self._write_or_give_up(entry)

    async def _write_or_give_up(self, entry: JournalEntry) -> None:
        """Settle an entry, or leave a faulty settlement to the next start, which settles at the checkpoint.

        Raises StorageUnavailable.
        """
        try:
            await self._write(entry)
        except StorageUnavailable:
            raise
        except Exception as exc:  # noqa: BLE001  # it must not hold up the others
            self._unsettled.pop(entry, None)
            self._log.error("settlement_broke", request_id=entry.stream.request_id, error=safe_traceback(exc))

    async def _write(self, entry: JournalEntry, linger_s: float = 0.0) -> None:
        stream = entry.stream
        unit = settlement_of(entry)
        billed_tokens = await self._database.submit(unit, linger_s=linger_s)
        self._unsettled.pop(entry, None)
        if not entry.mark_settled():  # a settlement that was tried again may be committed twice
            return
        if stream.cancelled == DELETED:
            self._database.text_deleted.set()
        model, usage = stream.request.model, unit.settlement.usage
        cost = cost_micro_usd(usage, entry.terms.price)
        self._traffic.of(model).add_bill(usage, cost)
        self._on_settled(entry.terms.owner, entry.terms.day, stream.request_id, cost)
        emitted_tokens, read_whole = entry.emitted_tokens, entry.read_whole
        self._balance.compare(model, stream.request_id, billed_tokens, emitted_tokens, read_whole=read_whole)

    # All of them, once a second

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(self._checkpoint_s)
            try:
                await self._settle_left()
                await self._checkpoint()
                await indexing.index_all(self._database, indexing.TICK_UNITS)
                if self._database.failing:
                    await self._database.write(probe)
                await self._retention.sweep()
            except StorageUnavailable as error:
                self._not_written(error)
            except Exception as exc:  # noqa: BLE001  # the next checkpoint must be written
                self._log.error("checkpoint_broke", error=safe_traceback(exc))
            else:
                self._written_at_s = time.monotonic()

    async def _checkpoint(self) -> None:
        """Write what every live stream released since its last checkpoint, in one unit."""
        unsaved: list[Checkpoint] = []
        saved: dict[JournalEntry, int] = {}
        for number, entry in enumerate(list(self._live), start=1):
            if number % CHECKPOINT_BATCH == 0:
                await asyncio.sleep(0)  # thousands of streams: their tokens do not wait for all of them
            if (checkpoint := entry.checkpoint()) is not None:
                unsaved.append(checkpoint)
                saved[entry] = entry.stream.last_id
        if unsaved:
            await self._database.write(lambda connection: checkpoints.write(connection, unsaved))
        for entry, last_id in saved.items():
            entry.saved(last_id)

    async def _settle_left(self) -> None:
        """Settle what could not be written; the ticker calls it. Raises StorageUnavailable."""
        for entry in list(self._unsettled):
            if entry.stream.done:
                await self._write_or_give_up(entry)

    def _not_written(self, error: StorageUnavailable) -> None:
        stuck_s = time.monotonic() - self._written_at_s
        self._log.warning("not_written", error=error.code, stuck_s=round(stuck_s, 1), live=len(self._live))
        if stuck_s >= self._max_outage_s:
            for entry in list(self._live):
                entry.stream.cancel(STORAGE)
