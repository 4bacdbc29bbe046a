"""One remote SGLang server: its HTTP, its circuit breaker, its last known load. Nothing of any model.

A request's answer that breaks off raises `ServerGone`; what the server itself refuses raises `Refusal`.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson

from app.core import EngineLoad
from app.engine.remote.circuit_breaker import Breaker
from app.engine.remote.events import refusal_of
from app.engine.remote.faults import Fault

CONNECT_TIMEOUT_S = 5.0
HEADERS_TIMEOUT_S = 15.0
"""SGLang answers `/generate` with headers at once, before it has a token."""
POLL_TIMEOUT_S = 5.0
HEALTH_TIMEOUT_S = 30.0
"""`/health` generates a token where nothing else runs, and gives up after 20 s."""
MAX_ANSWER_BYTES = 4 * 1024**2
MAX_REFUSAL_BYTES = 64 * 1024

Read = Callable[[], Awaitable[bytes]]


class ServerGone(Exception):
    """The server cannot be reached, broke off, took too long, or sent what no SGLang sends: `kind`."""

    def __init__(self, message: str, kind: Fault) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: until connected, until headers, the longest silence of a stream, and for a poll."""

    connect_s: float = CONNECT_TIMEOUT_S
    headers_s: float = HEADERS_TIMEOUT_S
    silence_s: float = 300.0
    poll_s: float = POLL_TIMEOUT_S


class RemoteServer:
    """One base URL. The session, and with it the connection pool, is the owner's."""

    def __init__(
        self, url: str, session: aiohttp.ClientSession, timeouts: Timeouts, breaker: Breaker
    ) -> None:
        self.url = url
        self.breaker = breaker
        self.num_open = 0
        """Streams of ours that are open on it."""
        self.load: EngineLoad | None = None
        """The load as last reported; None until then, and where the server reports none."""
        self._session = session
        self._timeouts = timeouts
        self._heard_s = 0.0
        self._streamed_s = 0.0
        self._streams: set[aiohttp.ClientResponse] = set()

    # --- requests

    @asynccontextmanager
    async def generate(self, body: Mapping[str, Any]) -> AsyncIterator[Read]:
        """Send a request to `/generate`; gives a function that reads what has come, empty at the end.

        Leaving the block before the end closes the connection, which makes SGLang abort. Raises
        ServerGone and Refusal.
        """
        self.num_open += 1
        try:
            response = await self._post("/generate", body)
            self._streams.add(response)
            self._streamed_s = self._heard_s
            try:
                await self._check(response)
                yield lambda: self._read(response)
            finally:
                self._streams.discard(response)
                response.close()
        finally:
            self.num_open -= 1

    async def abort(self, rid: str) -> None:
        """Ask it to stop `rid`; an id that it does not know is ignored. Raises ServerGone."""
        response = await self._post("/abort_request", {"rid": rid})
        response.release()

    def cut(self) -> None:
        """Break off every stream: the server is gone, and its connections may never say so."""
        for response in list(self._streams):
            response.close()

    def hear_stream(self) -> None:
        """Note that the server works, though its streams have brought nothing: on a long prompt, say."""
        self._streamed_s = asyncio.get_running_loop().time()

    def silent_s(self, now_s: float) -> float:
        """The seconds without anything from the open streams, or a change of the load; 0 without a stream."""
        return now_s - self._streamed_s if self._streams else 0.0

    # --- what it is

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON of a GET; None for an empty answer. Raises ServerGone, Refusal."""
        try:
            async with asyncio.timeout(timeout_s or self._timeouts.poll_s), self._get(path) as response:
                await self._check(response)
                data = await response.content.read(MAX_ANSWER_BYTES)
                self._hear()
                return orjson.loads(data) if data else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
            raise _gone(exc, "unreachable") from None

    async def poll(self) -> None:
        """Read its load; a change of it is a sign of life. Raises ServerGone, Refusal."""
        document = await self.get("/v1/loads?include=core")
        try:
            ranks = document["loads"]
            load = EngineLoad(
                num_running_reqs=sum(int(rank["num_running_reqs"]) for rank in ranks),
                num_queue_reqs=sum(int(rank["num_waiting_reqs"]) for rank in ranks),
                used_tokens=sum(int(rank["num_used_tokens"]) for rank in ranks),
                max_total_tokens=sum(int(rank["max_total_num_tokens"]) for rank in ranks),
                gen_throughput_tokens_per_s=sum(float(rank["gen_throughput"]) for rank in ranks),
                max_running_reqs=sum(int(rank.get("max_running_requests", 0)) for rank in ranks),
            )
        except (KeyError, TypeError, ValueError) as exc:
            raise ServerGone(f"its load cannot be read ({type(exc).__name__})", "unreadable") from None
        if load != self.load:
            self.hear_stream()
        self.load = load

    def heard_since(self, now_s: float) -> bool:
        """Whether anything came from it after `now_s`, on the loop's clock."""
        return self._heard_s > now_s

    # --- inside

    def _hear(self) -> None:
        self._heard_s = asyncio.get_running_loop().time()

    def _get(self, path: str) -> Any:
        return self._session.get(self.url + path, allow_redirects=False)

    async def _post(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._timeouts.connect_s, sock_read=self._timeouts.silence_s
        )
        headers = {"content-type": "application/json"}
        try:
            async with asyncio.timeout(self._timeouts.headers_s):
                response = await self._session.post(
                    self.url + path,
                    data=orjson.dumps(body),
                    headers=headers,
                    timeout=timeout,
                    allow_redirects=False,
                )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
            raise _gone(exc, "unreachable") from None
        self._hear()
        return response

    async def _check(self, response: aiohttp.ClientResponse) -> None:
        """Raise what the status says: a server that failed is gone, one that refuses has its reasons."""
        status = response.status
        if status >= HTTPStatus.INTERNAL_SERVER_ERROR and status != HTTPStatus.SERVICE_UNAVAILABLE:
            raise ServerGone(f"status {status}", "unreachable")
        if status != HTTPStatus.OK:
            raise refusal_of(status, await response.content.read(MAX_REFUSAL_BYTES))

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        try:
            data = await response.content.readany()
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
            raise _gone(exc, "silent" if isinstance(exc, TimeoutError) else "broke_off") from None
        self._hear()
        self._streamed_s = self._heard_s
        return data


def _gone(exc: Exception, kind: Fault) -> ServerGone:
    """Without aiohttp's words: they may quote what came."""
    if isinstance(exc, aiohttp.ClientConnectorError):
        return ServerGone("no connection", kind)
    if isinstance(exc, TimeoutError):
        return ServerGone("no answer in time", kind)
    return ServerGone(f"broke off ({type(exc).__name__})", kind)
