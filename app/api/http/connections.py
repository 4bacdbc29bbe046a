"""The open connections: how many there may be, and which are closed first when descriptors run short.

Descriptors run short if the next socket's number is near the process's limit. The store, the engine and the
log need descriptors too, and a server without a free one can neither accept a connection nor refuse it.
First the connections that wait for a request are closed, the longest idle first. Then follow those that are
still sending a request, then those whose client does not read its answer. A connection that waits for its
answer is never closed.
"""

from __future__ import annotations

import asyncio
import itertools
import resource
from collections import Counter

from structlog.typing import FilteringBoundLogger

SPARE_FILES = (32, 256)
"""Least and greatest number of descriptors that stay free; between these, an eighth of the limit.

So many connections may be accepted in one pass of the event loop, before others have been closed for them."""

LOG_EVERY_S = 10.0
"""Least seconds between two log lines about a lack of connections."""


class Connections:
    """Counts connections, and makes room for new ones."""

    def __init__(self, log: FilteringBoundLogger, limit: int = 0, limit_per_address: int = 0) -> None:
        """Allow `limit` connections, `limit_per_address` of each address; 0: as open files allow."""
        self._log = log
        self._limit = limit
        self._limit_per_address = limit_per_address
        self._addresses: dict[asyncio.Transport, str] = {}
        self._idle: dict[asyncio.Transport, None] = {}
        self._reading: dict[asyncio.Transport, None] = {}
        self._stalled: dict[asyncio.Transport, None] = {}
        self._closing: set[asyncio.Transport] = set()
        """Told to close, and still with a descriptor."""
        self._by_address: Counter[str] = Counter()
        self._closed = 0
        self._refused = 0
        self._log_timer: asyncio.Handle | None = None

    def accept(self, connection: asyncio.Transport, address: str, descriptor: int) -> bool:
        """Accept a new connection, closing others if they must make room; False where it must be closed."""
        if self._limit_per_address and self._by_address[address] >= self._limit_per_address:
            self._refused += 1
            self._log_shortage()
            return False
        missing = self._missing(descriptor)
        if missing > 0:
            self._log_shortage()
            if not (self._idle or self._reading or self._stalled):
                self._refused += 1
                return False
            self._make_room(missing)
        self._addresses[connection] = address
        self._by_address[address] += 1
        self._idle[connection] = None
        return True

    def reading(self, connection: asyncio.Transport) -> None:
        """Note that the head of a request has arrived, and its body is awaited."""
        self._move(connection, self._reading)

    def answering(self, connection: asyncio.Transport) -> None:
        """Note that a request has arrived whole."""
        self._move(connection, None)

    def idle(self, connection: asyncio.Transport) -> None:
        """Note that a connection's request has been answered."""
        self._move(connection, self._idle)

    def stalled(self, connection: asyncio.Transport) -> None:
        """Note that a connection's client does not read, or is kept waiting for a refusal."""
        if connection not in self._idle:
            self._move(connection, self._stalled)

    def flowing(self, connection: asyncio.Transport) -> None:
        """Note that a connection's client reads again."""
        self._stalled.pop(connection, None)

    def _move(self, connection: asyncio.Transport, where: dict[asyncio.Transport, None] | None) -> None:
        self._idle.pop(connection, None)
        self._reading.pop(connection, None)
        self._stalled.pop(connection, None)
        if where is not None and connection in self._addresses and connection not in self._closing:
            where[connection] = None

    def remove(self, connection: asyncio.Transport) -> None:
        """Note that a connection is closed; a second call does nothing."""
        self._move(connection, None)
        self._closing.discard(connection)
        address = self._addresses.pop(connection, None)
        if address is not None:
            self._by_address[address] -= 1
            if not self._by_address[address]:
                del self._by_address[address]

    def _missing(self, descriptor: int) -> int:
        """The number of connections to close for a new connection with this descriptor."""
        missing = len(self._addresses) + 1 - self._limit if self._limit else 0
        files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        if files != resource.RLIM_INFINITY:
            least, largest = SPARE_FILES
            # The lowest free number is taken: so many are in use.
            missing = max(missing, descriptor + 1 - (files - max(least, min(files // 8, largest))))
        return missing - len(self._closing)

    def _make_room(self, number: int) -> None:
        for connection in list(
            itertools.islice(itertools.chain(self._idle, self._reading, self._stalled), number)
        ):
            self._move(connection, None)
            self._closing.add(connection)
            self._closed += 1
            connection.abort()

    def _log_shortage(self) -> None:
        """Log the lack of connections: at once, then as sums every `LOG_EVERY_S`."""
        if self._log_timer is None:
            self._log_timer = asyncio.get_running_loop().call_soon(self._write)

    def _write(self) -> None:
        self._log_timer = None
        if not (self._closed or self._refused):
            return
        self._log.warning(
            "connections_short",
            open=len(self._addresses),
            closed=self._closed,
            refused=self._refused,
            hint="raise ulimit -n or max_connections, or check which clients hold them",
        )
        self._closed = self._refused = 0
        self._log_timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._write)
