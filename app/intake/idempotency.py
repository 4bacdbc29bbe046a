"""Idempotency keys: which stream a caller's key has made, and one request of a key at a time."""

from __future__ import annotations

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext
from weakref import WeakValueDictionary

from app.core import ANY_BODY, IdempotencyKey
from app.intake.continued_streams import ContinuedStreams
from app.metering.reads import Reads
from app.stream.archive import Archive, MakeWire
from app.stream.registry import StreamRegistry
from app.stream.token_stream import TokenStream


class IdempotencyKeys:
    """The keys of all callers."""

    def __init__(
        self, streams: StreamRegistry, archive: Archive, continued: ContinuedStreams, reads: Reads
    ) -> None:
        self._streams = streams
        self._archive = archive
        self._continued = continued
        self._reads = reads
        self._locks: WeakValueDictionary[tuple[str, str], asyncio.Lock] = WeakValueDictionary()

    def lock(self, owner: str, key: IdempotencyKey | None) -> AbstractAsyncContextManager[None]:
        """The lock of a key: a request waits until each earlier one has its stream or was refused."""
        return nullcontext() if key is None else self._locks.setdefault((owner, key.key), asyncio.Lock())

    async def is_known(self, owner: str, key: str) -> bool:
        """True where this key has made a stream, with any body. Raises RateLimited, Overloaded."""
        async with self._reads.slot(owner):
            return await self._look_up(owner, IdempotencyKey(key, ANY_BODY)) is not None

    async def find_stream(
        self, owner: str, key: IdempotencyKey | None, make_wire: MakeWire, after: int
    ) -> TokenStream | None:
        """The stream that this key made, for a reader that has received event `after`.

        Raises Conflict if its body was another, and what `ContinuedStreams.find_or_continue` does.
        """
        stream_or_id = None if key is None else await self._look_up(owner, key)
        if not isinstance(stream_or_id, str):
            return stream_or_id
        async with self._reads.slot(owner):
            return await self._continued.find_or_continue(owner, stream_or_id, make_wire, after)

    async def _look_up(self, owner: str, key: IdempotencyKey) -> TokenStream | str | None:
        """The stream of a key in memory, else the id of the stored one. Raises Conflict."""
        return self._streams.find_by_key(owner, key) or await self._archive.find_id_by_key(owner, key)
