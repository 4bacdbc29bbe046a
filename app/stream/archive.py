"""The archive: streams that are no longer in memory, read from the store."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable

from app.core import ChatRequest, IdempotencyKey
from app.store import events
from app.store.database import Database
from app.stream.registry import check_same_body
from app.stream.replay import replayed
from app.stream.token_stream import TokenStream, Wire

MakeWire = Callable[[ChatRequest], Wire]


class Archive:
    """Finds stored streams. Each call reads the store and returns a finished stream."""

    def __init__(self, database: Database, limit_bytes: int) -> None:
        self._database = database
        self._limit_bytes = limit_bytes

    async def find(self, owner: str, request_id: str, make_wire: MakeWire, after: int) -> TokenStream | None:
        """The owner's stream with this id, for a reader that has received event `after`; else None.

        Raises StorageUnavailable, NotFound, InternalError.
        """
        stored = await self._database.read(lambda c: events.load(c, request_id, owner))
        if stored is None:
            return None
        return replayed(stored, make_wire, self._limit_bytes, after)

    async def erase(self, owner: str, request_id: str) -> None:
        """Delete the text of the owner's stream; its counts stay. Raises StorageUnavailable.

        A stream that is not settled yet is marked, and erased at its settlement.
        """

        def unit(connection: sqlite3.Connection) -> None:
            request_seq = events.visible(connection, request_id, owner)
            if request_seq is not None:
                events.erase(connection, request_seq)

        await self._database.write(unit)
        self._database.text_deleted.set()

    async def find_id_by_key(self, owner: str, key: IdempotencyKey) -> str | None:
        """The id of the finished stream made with this key. Raises Conflict if its body was another."""
        row = await self._database.read(lambda c: events.find_by_key(c, owner, key.key))
        if row is None:
            return None
        request_id, fingerprint = row
        check_same_body(key, fingerprint)
        return request_id
