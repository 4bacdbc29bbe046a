"""One streaming chat as its client sees it: raw HTTP/1.1 over kept-alive connections, thousands at once.

Cheap on purpose, since server and load share a machine: while an answer comes only its frames are
counted; its end (finish reason, usage, an error event) is parsed once, from the last bytes.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

TAIL_BYTES = 2000
LAST_CHUNK = b"\r\n0\r\n\r\n"
_CONTENT = re.compile(rb'"content":"(?!")')
_DATA = re.compile(rb"data: (\{[^\n]*\})\n\n")
PATH = "/api/chat/completions"


@dataclass(slots=True)
class Attempt:
    """One attempt. Times are monotonic, in seconds; status 0 is no answer at all."""

    key: int
    sent_at_s: float
    status: int = 0
    code: str = ""
    """Of a refusal, or of the error that ended a stream; `connection` where the connection broke."""
    retry_after_s: float | None = None
    should_retry: bool = True
    first_at_s: float | None = None
    ended_at_s: float | None = None
    frames: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finish_reason: str = ""

    @property
    def ttft_s(self) -> float:
        """From sending to the first content; endless where there was none."""
        return float("inf") if self.first_at_s is None else self.first_at_s - self.sent_at_s

    @property
    def took_s(self) -> float:
        """From sending to the last byte; endless where the answer was not whole."""
        return (
            self.ended_at_s - self.sent_at_s if self.whole and self.ended_at_s is not None else float("inf")
        )

    @property
    def whole(self) -> bool:
        """Whether an answer came to its own end, its usage with it."""
        return self.status == 200 and not self.code and self.finish_reason in ("stop", "length")

    @property
    def served_tokens(self) -> int:
        """What it took of the engine: uncached prompt and answer, once it has ended."""
        return self.prompt_tokens - self.cached_tokens + self.completion_tokens


OnFrames = Callable[[int, int], None]
"""Told of frames that came: the key's number, and how many."""


def _nobody(_key: int, _frames: int) -> None:
    pass


class Asker:
    """Sends chats with any of some keys; connections are kept and used again."""

    def __init__(self, port: int, keys: list[str], on_frames: OnFrames = _nobody) -> None:
        self._port = port
        self.num_keys = len(keys)
        self.on_frames = on_frames
        self._heads = [
            f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nAuthorization: Bearer {key}\r\n"
            "Content-Type: application/json\r\nContent-Length: ".encode()
            for key in keys
        ]
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def ask(self, key: int, body: bytes) -> Attempt:
        """Send one chat, and read its answer to the end whatever it is. Raises nothing of the network's."""
        payload = b"%s%d\r\n\r\n%s" % (self._heads[key], len(body), body)
        attempt = Attempt(key, time.monotonic())
        try:
            if not (self._idle and await self._used_again(payload, attempt)):
                connection = await self._connect()
                await connection.exchange(payload, attempt)
        except OSError:
            attempt.code = "connection"
        attempt.ended_at_s = time.monotonic()
        return attempt

    async def _used_again(self, payload: bytes, attempt: Attempt) -> bool:
        """Whether a kept connection took it: the server may close one just when it is used."""
        try:
            await self._idle.pop().exchange(payload, attempt)
        except OSError:
            if attempt.status:
                raise
            return False
        return True

    def close(self) -> None:
        """Break off everything."""
        for connection in list(self._open):
            connection.transport.abort()

    async def _connect(self) -> _Connection:
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: _Connection(self), "127.0.0.1", self._port
        )
        return connection

    def opened(self, connection: _Connection) -> None:
        """Called by a connection that is made."""
        self._open.add(connection)

    def free(self, connection: _Connection) -> None:
        """Called by a connection whose answer has ended."""
        self._idle.append(connection)

    def lost(self, connection: _Connection) -> None:
        """Called by a connection that is closed."""
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)


class _Connection(asyncio.Protocol):
    """One exchange at a time."""

    transport: asyncio.Transport

    def __init__(self, asker: Asker) -> None:
        self._asker = asker
        self._attempt: Attempt | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._tail = b""
        self._left = 0
        """Bytes of a body of known length still to come."""

    async def exchange(self, payload: bytes, attempt: Attempt) -> None:
        self._attempt, self._head, self._tail = attempt, b"", b""
        self._done = asyncio.get_running_loop().create_future()
        self.transport.write(payload)
        try:
            await self._done
        except asyncio.CancelledError:
            self.transport.abort()
            raise

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._asker.opened(self)

    def connection_lost(self, _exc: Exception | None) -> None:
        self._asker.lost(self)
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionError("closed within an answer"))

    def data_received(self, data: bytes) -> None:
        attempt = self._attempt
        if attempt is None:
            return
        if not attempt.status:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._read_head(head, attempt)
        self._take(data, attempt)

    def _read_head(self, head: bytes, attempt: Attempt) -> None:
        first, *lines = head.split(b"\r\n")
        attempt.status = int(first.split(b" ", 2)[1])
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        self._left = int(headers.get(b"content-length", b"-1"))
        if b"retry-after" in headers:
            attempt.retry_after_s = float(headers[b"retry-after"])
        attempt.should_retry = headers.get(b"x-should-retry") != b"false"

    def _take(self, data: bytes, attempt: Attempt) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._end(attempt)
            return
        if attempt.first_at_s is None and _CONTENT.search(data):
            attempt.first_at_s = time.monotonic()
        frames = data.count(b"\n\n")
        if frames:
            attempt.frames += frames
            self._asker.on_frames(attempt.key, frames)
        if self._tail.endswith(LAST_CHUNK):
            self._end(attempt)

    def _end(self, attempt: Attempt) -> None:
        if attempt.status == 200:
            for event in _DATA.findall(self._tail):
                _read_event(json.loads(event), attempt)
        else:
            attempt.code = _code(self._tail)
        self._attempt = None
        if self._done is not None and not self._done.done():
            self._asker.free(self)
            self._done.set_result(None)


def _read_event(chunk: dict[str, Any], attempt: Attempt) -> None:
    if error := chunk.get("error"):
        attempt.code = str(error.get("code"))
    for choice in chunk.get("choices") or ():
        attempt.finish_reason = choice.get("finish_reason") or attempt.finish_reason
    if usage := chunk.get("usage"):
        attempt.prompt_tokens = usage["prompt_tokens"]
        attempt.completion_tokens = usage["completion_tokens"]
        attempt.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "unreadable"
