"""One remote SGLang server: its HTTP, its circuit breaker, its last known load. Nothing of any model.

A request's answer that breaks off raises `ServerGone`; what the server itself refuses raises `Refusal`. The
client is aiohttp: it takes 2 us of CPU for an event of a stream, where httpx takes 13.

| breaker | requests | until |
|---|---|---|
| closed | pass | `threshold` failures in a row, or `trip` → open |
| open | refused | a probe that succeeds → closed |
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import aiohttp
import orjson

from app.core import EngineLoad
from app.engine.http.events import Fault, Refusal, ServerGone, refusal_of
from app.engine.http.model import Facts

HEALTH_TIMEOUT_S = 30.0
"""`/health` generates a token where nothing else runs, and gives up after 20 s."""
MAX_ANSWER_BYTES = 4 * 1024**2
MAX_REFUSAL_BYTES = 64 * 1024
NOT_FOUND = 404


Read = Callable[[], Awaitable[bytes]]


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Seconds: until connected, until headers, the longest silence of a stream, and for a poll.

    SGLang answers `/generate` with headers at once, before it has a token.
    """

    connect_s: float = 5.0
    headers_s: float = 15.0
    silence_s: float = 300.0
    poll_s: float = 5.0


class Breaker:
    """A circuit breaker: a server that keeps failing gets no request until a probe finds it healthy.

    Probes are the pool's: no caller's request is spent on finding out.
    """

    def __init__(self, threshold: int = 3) -> None:
        self._threshold = threshold
        self._failures = 0
        self.is_open = False

    def succeeded(self) -> None:
        """The server did what it was asked. An open breaker stays so: only a probe closes it."""
        self._failures = 0

    def failed(self) -> None:
        """A request or a poll failed."""
        self._failures += 1
        self.is_open = self.is_open or self._failures >= self._threshold

    def trip(self) -> None:
        """Open at once."""
        self.is_open = True

    def close(self) -> None:
        """A probe found the server healthy."""
        self._failures = 0
        self.is_open = False


class RemoteServer:
    """One base URL. The session, and with it the connection pool, is the owner's."""

    def __init__(self, url: str, session: aiohttp.ClientSession, timeouts: Timeouts) -> None:
        self.url = url
        self.breaker = Breaker()
        self.num_open = 0
        """Streams of ours that are open on it."""
        self.load: EngineLoad | None = None
        """The load as last reported; None until then, and where the server reports none."""
        self._session = session
        self._timeouts = timeouts
        self._received_s = 0.0
        """Time of the last byte received; the next is that of its streams."""
        self._progress_s = 0.0
        self._streams: set[aiohttp.ClientResponse] = set()

    # --- requests

    @asynccontextmanager
    async def generate(self, body: Mapping[str, Any]) -> AsyncIterator[Read]:
        """Send a request to `/generate`; gives a function that reads what was received, empty at the end.

        Leaving the block before the end closes the connection, which makes SGLang abort. Raises
        ServerGone and Refusal.
        """
        self.num_open += 1
        try:
            response = await self._post("/generate", body)
            self._streams.add(response)
            self._progress_s = self._received_s
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

    def touch(self) -> None:
        """Note that the server works, though its streams have sent nothing: on a long prompt, say."""
        self._progress_s = asyncio.get_running_loop().time()

    def silent_s(self, now_s: float) -> float:
        """The seconds without anything from the open streams, or a change of the load; 0 without a stream."""
        return now_s - self._progress_s if self._streams else 0.0

    # --- what it is

    async def get(self, path: str, timeout_s: float | None = None) -> Any:
        """The JSON of a GET; None for an empty answer. Raises ServerGone, Refusal."""
        try:
            request = self._session.get(self.url + path, allow_redirects=False)
            async with asyncio.timeout(timeout_s or self._timeouts.poll_s), request as response:
                await self._check(response)
                data = await response.content.read(MAX_ANSWER_BYTES)
                self._note_answer()
                return orjson.loads(data) if data else None
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
            raise _gone(exc, "unreachable") from None

    async def poll(self) -> None:
        """Read its load; a change of it is a sign of life. Raises ServerGone, Refusal."""
        document = await self.get("/v1/loads?include=core")
        try:
            load = total_load([_load(rank) for rank in document["loads"]])
        except (KeyError, TypeError, ValueError) as exc:
            raise ServerGone(f"its load cannot be read ({type(exc).__name__})", "unreadable") from None
        if load != self.load:
            self.touch()
        self.load = load

    async def facts(self) -> Facts:
        """The facts that it reports, under the newer or the older names.

        Raises ServerGone, and Refusal, of which 404 says that it is no SGLang.
        """
        return Facts(
            await self._either("/model_info", "/get_model_info"),
            await self._either("/server_info", "/get_server_info"),
        )

    async def _either(self, path: str, older_path: str) -> dict[str, object]:
        try:
            document = await self.get(path)
        except Refusal as refused:
            if refused.status != NOT_FOUND:
                raise
            document = await self.get(older_path)
        if not isinstance(document, dict):
            raise ServerGone(f"{path} is no JSON object", "unreadable")
        return document

    def answered_since(self, now_s: float) -> bool:
        """True if anything was received from it after `now_s`, on the loop's clock."""
        return self._received_s > now_s

    # --- inside

    def _note_answer(self) -> None:
        self._received_s = asyncio.get_running_loop().time()

    async def _post(self, path: str, body: Mapping[str, Any]) -> aiohttp.ClientResponse:
        timeout = aiohttp.ClientTimeout(
            total=None, sock_connect=self._timeouts.connect_s, sock_read=self._timeouts.silence_s
        )
        try:
            async with asyncio.timeout(self._timeouts.headers_s):
                response = await self._session.post(
                    self.url + path,
                    data=orjson.dumps(body),
                    headers={"content-type": "application/json"},
                    timeout=timeout,
                    allow_redirects=False,
                )
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as exc:
            raise _gone(exc, "unreachable") from None
        self._note_answer()
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
        self._note_answer()
        self._progress_s = self._received_s
        return data


def _gone(exc: Exception, kind: Fault) -> ServerGone:
    """The error without aiohttp's message, which may quote the answer."""
    if isinstance(exc, aiohttp.ClientConnectorError):
        return ServerGone("no connection", kind)
    if isinstance(exc, TimeoutError):
        return ServerGone("no answer in time", kind)
    return ServerGone(f"broke off ({type(exc).__name__})", kind)


def total_load(loads: Sequence[EngineLoad]) -> EngineLoad:
    """The sum of the loads of ranks or of servers."""
    return EngineLoad(
        num_running_reqs=sum(load.num_running_reqs for load in loads),
        num_queue_reqs=sum(load.num_queue_reqs for load in loads),
        used_tokens=sum(load.used_tokens for load in loads),
        max_total_tokens=sum(load.max_total_tokens for load in loads),
        gen_throughput_tokens_per_s=sum(load.gen_throughput_tokens_per_s for load in loads),
        max_running_reqs=sum(load.max_running_reqs for load in loads),
    )


def _load(rank: Mapping[str, Any]) -> EngineLoad:
    """The load of one rank, from SGLang's document."""
    return EngineLoad(
        num_running_reqs=int(rank["num_running_reqs"]),
        num_queue_reqs=int(rank["num_waiting_reqs"]),
        used_tokens=int(rank["num_used_tokens"]),
        max_total_tokens=int(rank["max_total_num_tokens"]),
        gen_throughput_tokens_per_s=float(rank["gen_throughput"]),
        max_running_reqs=int(rank.get("max_running_requests", 0)),
    )
