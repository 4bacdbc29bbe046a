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
class Asked:
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

    async def ask(self, key: int, body: bytes) -> Asked:
        """Send one chat, and read its answer to the end whatever it is. Raises nothing of the network's."""
        payload = b"%s%d\r\n\r\n%s" % (self._heads[key], len(body), body)
        asked = Asked(key, time.monotonic())
        try:
            if not (self._idle and await self._used_again(payload, asked)):
                connection = await self._connect()
                await connection.exchange(payload, asked)
        except OSError:
            asked.code = "connection"
        asked.ended_at_s = time.monotonic()
        return asked

    async def _used_again(self, payload: bytes, asked: Asked) -> bool:
        """Whether a kept connection took it: the server may close one just when it is used."""
        try:
            await self._idle.pop().exchange(payload, asked)
        except OSError:
            if asked.status:
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
        self._asked: Asked | None = None
        self._done: asyncio.Future[None] | None = None
        self._head = b""
        self._tail = b""
        self._left = 0
        """Bytes of a body of known length still to come."""

    async def exchange(self, payload: bytes, asked: Asked) -> None:
        self._asked, self._head, self._tail = asked, b"", b""
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
        asked = self._asked
        if asked is None:
            return
        if not asked.status:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            self._read_head(head, asked)
        self._take(data, asked)

    def _read_head(self, head: bytes, asked: Asked) -> None:
        first, *lines = head.split(b"\r\n")
        asked.status = int(first.split(b" ", 2)[1])
        headers = {name.lower(): value for name, _, value in (line.partition(b": ") for line in lines)}
        self._left = int(headers.get(b"content-length", b"-1"))
        if b"retry-after" in headers:
            asked.retry_after_s = float(headers[b"retry-after"])
        asked.should_retry = headers.get(b"x-should-retry") != b"false"

    def _take(self, data: bytes, asked: Asked) -> None:
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if self._left >= 0:
            self._left -= len(data)
            if self._left <= 0:
                self._end(asked)
            return
        if asked.first_at_s is None and _CONTENT.search(data):
            asked.first_at_s = time.monotonic()
        frames = data.count(b"\n\n")
        if frames:
            asked.frames += frames
            self._asker.on_frames(asked.key, frames)
        if self._tail.endswith(LAST_CHUNK):
            self._end(asked)

    def _end(self, asked: Asked) -> None:
        if asked.status == 200:
            for event in _DATA.findall(self._tail):
                _read_event(json.loads(event), asked)
        else:
            asked.code = _code(self._tail)
        self._asked = None
        if self._done is not None and not self._done.done():
            self._asker.free(self)
            self._done.set_result(None)


def _read_event(chunk: dict[str, Any], asked: Asked) -> None:
    if error := chunk.get("error"):
        asked.code = str(error.get("code"))
    for choice in chunk.get("choices") or ():
        asked.finish_reason = choice.get("finish_reason") or asked.finish_reason
    if usage := chunk.get("usage"):
        asked.prompt_tokens = usage["prompt_tokens"]
        asked.completion_tokens = usage["completion_tokens"]
        asked.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _code(body: bytes) -> str:
    try:
        return str(json.loads(body)["error"]["code"])
    except (ValueError, KeyError, TypeError):
        return "unreadable"
