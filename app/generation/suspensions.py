"""The requests that the process before has suspended, until their answers go on or their time is over.

    suspended ──(its client returns)──▶ taken up: the answer goes on (app.generation.answer_start)
        └──(nobody asks for it in time, or it was deleted)──▶ settled at what was released

The time begins with the process, because before that nobody could ask. It begins again when somebody asks in
vain, as the server is full, and when this process suspends a request itself: that is another's to go on with.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence

from structlog.typing import FilteringBoundLogger

from app.errors import StorageUnavailable
from app.generation.open_requests import settle_open
from app.generation.suspended import NotReadable, SuspendedRequest, unpack
from app.log import safe_traceback
from app.store import ledger, suspensions
from app.store.conversations import Status
from app.store.database import Database
from app.store.events import StoredStream
from app.store.ledger import cost_micro_usd

PERIOD_S = 1.0
"""Seconds between two looks at what has expired."""
OnSettled = Callable[[str, int, str, int], None]
"""Called with each committed settlement: owner, day, request id, cost in micro-dollars."""


class Suspensions:
    """The suspended requests of the store, by id."""

    def __init__(
        self,
        database: Database,
        log: FilteringBoundLogger,
        timeout_s: float,
        *,
        is_live: Callable[[str], bool],
        on_settled: OnSettled = lambda _owner, _day, _request_id, _cost: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """They may be asked for within `timeout_s`. `is_live` is whether one was asked for and goes on."""
        self._database = database
        self._log = log
        self._timeout_s = timeout_s
        self._is_live = is_live
        self._on_settled = on_settled
        self._clock_s = clock_s
        self._opened_s = clock_s()
        self._seqs: dict[str, int] = {}
        self._noted_s: dict[str, float] = {}
        """When a request was asked for, or suspended by this process."""
        self.num_continued = 0
        """Requests that this process has gone on with."""
        self.num_expired = 0
        """Requests that it has settled because nobody asked for them."""

    def __len__(self) -> int:
        return len(self._seqs)

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._seqs

    async def open(self) -> None:
        """Read which there are; the store is open. Raises StorageUnavailable."""
        self._seqs = await self._database.read(suspensions.ids)
        self._opened_s = self._clock_s()

    async def load(self, owner: str, request_id: str) -> tuple[StoredStream, SuspendedRequest | None] | None:
        """The owner's suspended request and its stream; None where there is none of that id.

        The request is None where this version cannot read it. Raises StorageUnavailable.
        """
        if request_id not in self._seqs:
            return None

        def load(
            connection: sqlite3.Connection,
        ) -> tuple[StoredStream, SuspendedRequest | NotReadable] | None:
            stored = suspensions.load(connection, request_id, owner)
            if stored is None:
                return None
            try:
                return stored.stream, unpack(stored)
            except NotReadable as exc:
                return stored.stream, exc

        loaded = await self._database.read(load)
        if loaded is None:
            return None
        stream, suspended = loaded
        if isinstance(suspended, NotReadable):
            self._log.error("suspended_unreadable", request_id=request_id, error=safe_traceback(suspended))
            return stream, None
        return stream, suspended

    def asked_for(self, request_id: str) -> None:
        """Note that somebody waits for a suspended request: its time begins again."""
        if request_id in self._seqs:  # it may have been settled meanwhile
            self._noted_s[request_id] = self._clock_s()

    def suspended(self, request_id: str, request_seq: int) -> None:
        """Note that this process has suspended a request."""
        self._seqs[request_id] = request_seq
        self._noted_s[request_id] = self._clock_s()

    def taken_up(self, request_id: str) -> None:
        """Note that a request goes on, and is suspended no more."""
        self._seqs.pop(request_id, None)
        self._noted_s.pop(request_id, None)
        self.num_continued += 1
        self._database.text_deleted.set()

    # Those that do not go on

    async def run(self) -> None:
        """Settle what has expired, until cancelled."""
        while True:
            try:
                await self.expire()
            except StorageUnavailable as exc:
                self._log.warning("suspended_not_settled", error=exc.code)
            except Exception as exc:  # noqa: BLE001  # the next look must come
                self._log.error("suspensions_broke", error=safe_traceback(exc))
            await asyncio.sleep(PERIOD_S)

    async def expire(self) -> int:
        """Settle what nobody has asked for in time; returns how many requests. Raises StorageUnavailable."""
        begun_s = self._clock_s() - self._timeout_s
        if not self._seqs or self._opened_s > begun_s:
            return 0
        noted_s = self._noted_s
        expired = [
            request_id
            for request_id in self._seqs
            if noted_s.get(request_id, self._opened_s) <= begun_s and not self._is_live(request_id)
        ]
        await self.settle(expired)
        self.num_expired += len(expired)
        if expired:
            hint = "nobody asked for these streams after the restart"
            self._log.info("suspended_expired", requests=len(expired), hint=hint)
        return len(expired)

    async def settle(
        self, request_ids: Sequence[str], outcome: str = "interrupted", status: Status = "interrupted"
    ) -> None:
        """Settle requests at what was released of them. Raises StorageUnavailable."""
        seqs = {
            request_id: self._seqs.pop(request_id) for request_id in request_ids if request_id in self._seqs
        }
        if not seqs:
            return

        def unit(connection: sqlite3.Connection) -> list[tuple[str, int, str, int] | None]:
            return [_settled(connection, seq, outcome, status) for seq in seqs.values()]

        try:
            settlements = await self._database.write(unit)
        except StorageUnavailable:
            self._seqs.update(seqs)
            raise
        for request_id in seqs:
            self._noted_s.pop(request_id, None)
        for settlement in settlements:
            if settlement is not None:
                self._on_settled(*settlement)
        self._database.text_deleted.set()

    async def settle_conversation(self, owner: str, conversation_id: str) -> None:
        """Settle what is suspended in a conversation that was deleted. Raises StorageUnavailable."""
        if not self._seqs:
            return
        request_ids = await self._database.read(
            lambda c: suspensions.of_conversation(c, owner, conversation_id)
        )
        await self.settle(request_ids, "abort", "cancelled")


def _settled(
    connection: sqlite3.Connection, seq: int, outcome: str, status: Status
) -> tuple[str, int, str, int] | None:
    """Settle a request if it is open; what it costs, for those who are told of settlements."""
    left, terms = ledger.open_request(connection, seq), ledger.terms_of(connection, seq)
    if left is None or terms is None:
        return None
    settle_open(connection, left, outcome, status)
    return left.owner, terms.day, left.id, cost_micro_usd(left.usage, terms.price)
