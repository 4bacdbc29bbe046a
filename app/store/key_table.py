"""The stored keys in memory: a request costs a lookup by id, never a query.

The server's own changes are seen at once. Those of a command beside it are seen within a second:
a one-row table says whether there are any, and is looked at every `POLL_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import sqlite3
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from structlog.typing import FilteringBoundLogger

from app.core import Key, Secret
from app.errors import StorageUnavailable
from app.log import safe_traceback
from app.store.database import Database
from app.store.keys import ID_CHARS, all_keys, version

T = TypeVar("T")
POLL_S = 0.4
_DECOY = (Secret(bytes(32), None),)
"""Compared with where there is nothing to compare with: it takes as long, and nothing hashes to it."""


def now_us() -> int:
    """UTC microseconds, as the store has them."""
    return time.time_ns() // 1000


class KeyTable:
    """All keys of an open store. Construct, `load()`, `watch()` in a task."""

    def __init__(
        self, database: Database, log: FilteringBoundLogger, clock_us: Callable[[], int] = now_us
    ) -> None:
        self._database = database
        self._log = log
        self._clock_us = clock_us
        self._version: int | None = None
        self._by_id: dict[str, Key] = {}
        self._failing = False

    @property
    def loaded(self) -> bool:
        """True once the store has been read."""
        return self._version is not None

    @property
    def empty(self) -> bool:
        """True if there has never been a key, revoked ones included."""
        return not self._by_id

    def get(self, key_id: str) -> Key | None:
        """The key of that id, whatever its status."""
        return self._by_id.get(key_id)

    def find(self, text: str, digest: bytes) -> Key | None:
        """The valid key that a caller sent, by its hash (app.store.keys.digest_of).

        Unknown, revoked and expired keys take the same steps as a wrong secret does.
        """
        at_us = self._clock_us()
        key = self._by_id.get(text[:ID_CHARS])
        secrets: Sequence[Secret] = (key.secrets if key is not None else ()) or _DECOY
        is_secret = False
        for secret in secrets:
            equal = hmac.compare_digest(secret.digest, digest)
            is_secret |= equal and (secret.ends_at_us is None or at_us < secret.ends_at_us)
        if key is not None and is_secret and key.status(at_us) == "active":
            return key
        return None

    async def load(self) -> None:
        """Read the keys, if they are not those that were read before. Raises StorageUnavailable."""
        number = await self._database.read(version)
        if number == self._version:
            return
        # Of one snapshot; the number only decides whether there is anything to read.
        number, keys = await self._database.read(lambda c: (version(c), all_keys(c)))
        if self._version is not None:
            if number < self._version:  # a later load was faster
                return
            self._log.info("keys_changed", keys=len(keys))
        self._by_id = {key.id: key for key in keys}
        self._version = number

    async def write(self, unit: Callable[[sqlite3.Connection], T]) -> T:
        """Write a unit, and load: the next request is judged by it. Raises what the unit does."""
        outcome = await self._database.write(unit)
        # The change is stored, and a new key is shown only once: it must not fail on a later read.
        with contextlib.suppress(StorageUnavailable):
            await self.load()
        return outcome

    async def watch(self) -> None:
        """Load what changes, as long as the task lives; while the store fails, the keys stay as they are."""
        while True:
            await asyncio.sleep(POLL_S)
            try:
                await self.load()
            except Exception as exc:  # noqa: BLE001  # a revocation must be seen once the store can be read again
                if not self._failing:
                    hint = "changes of keys are not seen meanwhile"
                    self._log.error("keys_unreadable", error=safe_traceback(exc), hint=hint)
                self._failing = True
            else:
                self._failing = False
