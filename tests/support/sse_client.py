"""A raw HTTP/1.1 and server-sent-events client with its hand on the socket.

It reads as little as asked, stops reading, closes in the middle, or resets. The parser follows
the HTML living standard, section 9.2.6, and not what our server happens to send. httpx-sse hides what
the tests look at: comments, blocks without data, and which bytes were read.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

READ_BYTES = 65536


async def until(condition: Callable[[], Any], timeout_s: float = 30.0, every_s: float = 0.002) -> Any:
    """Wait for `condition()` to be true and return it. Raises AssertionError after `timeout_s`."""
    loop = asyncio.get_running_loop()
    deadline_s = loop.time() + timeout_s
    while not (value := condition()):
        assert loop.time() < deadline_s, f"not true within {timeout_s} s: {condition}"
        await asyncio.sleep(every_s)
    return value


@dataclass(frozen=True)
class Event:
    """One dispatched event; `id` is None for one that came without."""

    id: int | None
    data: str
    type: str = "message"

    def json(self) -> Any:
        """The data as JSON."""
        return json.loads(self.data)


class SSEParser:
    """Bytes in any pieces to events."""

    def __init__(self) -> None:
        self._buffer = b""
        self._data: list[str] = []
        self._type = ""
        self._id: int | None = None
        self.last_id: int | None = None
        self.comments = 0
        self.retries: list[tuple[int, bool]] = []
        self.blank_without_data = 0
        """Blank lines that end a block without data: OpenAI's Python client fails on them."""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completes."""
        self._buffer += piece
        *lines, self._buffer = self._buffer.split(b"\n")
        events = []
        for line in lines:
            event = self._line(line.removesuffix(b"\r").decode("utf-8"))
            if event is not None:
                events.append(event)
        return events

    def _line(self, line: str) -> Event | None:
        if not line:
            return self._dispatch()
        if line.startswith(":"):
            self.comments += 1
            return None
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "data":
            self._data.append(value)
        elif name == "id":
            self._id = self.last_id = int(value)
        elif name == "event":
            self._type = value
        elif name == "retry":
            self.retries.append((int(value), self.last_id == 1 and not self._data))
        return None

    def _dispatch(self) -> Event | None:
        data, self._data = self._data, []
        kind, self._type = self._type or "message", ""
        event_id, self._id = self._id, None
        if not data:
            self.blank_without_data += 1
            return None
        return Event(event_id, "\n".join(data), kind)


class Chunked:
    """Decodes `transfer-encoding: chunked` from any pieces."""

    def __init__(self) -> None:
        self._buffer = b""
        self.done = False

    def feed(self, piece: bytes) -> bytes:
        """The body bytes that `piece` completes."""
        self._buffer += piece
        out = []
        while not self.done:
            head, newline, rest = self._buffer.partition(b"\r\n")
            if not newline:
                break
            size = int(head, 16)
            if len(rest) < size + 2:
                break
            assert rest[size : size + 2] == b"\r\n"
            out.append(rest[:size])
            self._buffer = rest[size + 2 :]
            self.done = size == 0
        return b"".join(out)

    def rest(self) -> bytes:
        """What came after the end: the next response."""
        return self._buffer


@dataclass
class Head:
    """Status line and headers of a response."""

    status: int
    headers: Mapping[str, str]


@dataclass
class Response:
    """A response read to its end."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        """The body as JSON."""
        return json.loads(self.body)

    def error(self) -> dict[str, Any]:
        """The body's error object."""
        error: dict[str, Any] = self.json()["error"]
        assert set(error) == {"message", "type", "param", "code"}
        return error

    def refusal(self) -> tuple[int, str, str | None]:
        """What a caller's code decides on: status, code, param."""
        error = self.error()
        return self.status, error["code"], error["param"]


class Connection:
    """One TCP connection to the server under test."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._loop = asyncio.get_running_loop()
        self._ahead = b""
        self._method = ""
        self.open = True

    @classmethod
    async def to(
        cls, port: int, *, receive_buffer_bytes: int | None = None, address: str | None = None
    ) -> Connection:
        """Connect; a small receive buffer makes a client that does not read felt soon.

        `address` is this side's: on Linux any of 127.0.0.0/8.
        """
        sock = socket.socket()
        sock.setblocking(False)
        if address is not None:
            sock.bind((address, 0))
        if receive_buffer_bytes is not None:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", port))
        except BaseException:
            sock.close()
            raise
        return cls(sock)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.close()

    async def send(self, piece: bytes) -> None:
        """Send bytes as they are."""
        await self._loop.sock_sendall(self._sock, piece)

    async def request(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | bytes | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """Send a whole request."""
        self._method = method
        await self.send(request_bytes(method, path, body, headers))

    async def read(self, limit_bytes: int = READ_BYTES) -> bytes:
        """At most `limit_bytes`; empty at the end of the connection. Raises ConnectionResetError."""
        if self._ahead:
            piece, self._ahead = self._ahead[:limit_bytes], self._ahead[limit_bytes:]
            return piece
        return await self._loop.sock_recv(self._sock, limit_bytes)

    async def head(self) -> Head:
        """The status line and headers of the next response."""
        raw = b""
        while b"\r\n\r\n" not in raw:
            piece = await self.read()
            if not piece:
                raise ConnectionResetError(f"closed after {raw!r}")
            raw += piece
        head, _, rest = raw.partition(b"\r\n\r\n")
        self._ahead = rest + self._ahead
        status_line, *lines = head.decode("latin-1").split("\r\n")
        headers = {k.lower(): v for k, _, v in (line.partition(": ") for line in lines)}
        return Head(int(status_line.split()[1]), headers)

    async def pieces(self, head: Head, size: Callable[[], int] = lambda: READ_BYTES) -> AsyncIterator[bytes]:
        """The body of the response `head` began, in reads of at most `size()` bytes.

        Ends early, without an error, when the connection does; `head` tells how much to expect.
        """
        if head.status == 204:
            return
        if head.headers.get("transfer-encoding") == "chunked":
            chunked = Chunked()
            while not chunked.done:
                piece = await self.read(size())
                if not piece:
                    return
                decoded = chunked.feed(piece)
                if decoded:
                    yield decoded
            self._ahead = chunked.rest() + self._ahead
            return
        if "content-length" not in head.headers:  # HTTP/1.0: to the end of the connection
            while piece := await self.read(size()):
                yield piece
            return
        left = int(head.headers["content-length"])
        while left:
            piece = await self.read(min(left, size()))
            if not piece:
                return
            left -= len(piece)
            yield piece

    async def response(self) -> Response:
        """The next response, whole. One to HEAD has no body: whatever came of one is in the next response."""
        head = await self.head()
        if self._method == "HEAD":
            return Response(head.status, head.headers, b"")
        return Response(head.status, head.headers, b"".join([p async for p in self.pieces(head)]))

    def close(self) -> None:
        """Close the usual way."""
        self.open = False
        self._sock.close()

    def reset(self) -> None:
        """Close with a TCP reset."""
        if self.open:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()


def request_bytes(
    method: str,
    path: str,
    body: Mapping[str, Any] | bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> bytes:
    """A whole HTTP/1.1 request."""
    payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    lines = {"host": "localhost", **(headers or {})}
    if body is not None:
        lines = {"content-type": "application/json", "content-length": str(len(payload)), **lines}
    head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
    return f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + payload


async def fetch(
    port: int,
    method: str,
    path: str,
    body: Mapping[str, Any] | bytes | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    """One request on a connection of its own."""
    async with await Connection.to(port) as connection:
        await connection.request(method, path, body, headers)
        return await connection.response()


@dataclass
class Transcript:
    """What a client has understood of one stream, over any number of connections."""

    ids: list[int] = field(default_factory=list)
    text: dict[tuple[int, str], str] = field(default_factory=dict)
    finish_reasons: dict[int, str] = field(default_factory=dict)
    errors: list[dict[str, Any]] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    stream_id: str | None = None
    done: bool = False
    num_events: int = 0

    @property
    def last_id(self) -> int:
        """The id to send as Last-Event-ID; 0 when nothing was received."""
        return self.ids[-1] if self.ids else 0

    def add(self, event: Event) -> None:
        """Take in one event."""
        assert not self.done, f"an event after [DONE]: {event}"
        assert event.type == "message"
        self.num_events += 1
        if event.id is not None:
            self.ids.append(event.id)
        if event.data == "[DONE]":
            self.done = True
            return
        chunk = event.json()
        if "error" in chunk:
            self.errors.append(chunk["error"])
            return
        assert chunk["object"] in ("chat.completion.chunk", "text_completion")
        assert self.stream_id in (None, chunk["id"])
        self.stream_id = chunk["id"]
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self._add_choice(choice)

    def _add_choice(self, choice: Mapping[str, Any]) -> None:
        index = choice["index"]
        delta = {"content": choice["text"]} if "text" in choice else choice["delta"]
        for channel, key in (("text", "content"), ("reasoning", "reasoning_content")):
            if delta.get(key) is not None:
                self._append((index, channel), delta[key])
        for call in delta.get("tool_calls", ()):
            self._append((index, f"tool{call['index']}"), call["function"].get("arguments", ""))
            if "name" in call["function"]:
                self._append((index, f"name{call['index']}"), call["function"]["name"])
        if choice["finish_reason"] is not None:
            assert index not in self.finish_reasons
            self.finish_reasons[index] = choice["finish_reason"]

    def _append(self, track: tuple[int, str], piece: str) -> None:
        self.text[track] = self.text.get(track, "") + piece

    def content(self, choice: int = 0) -> str:
        """The answer text of one choice."""
        return self.text.get((choice, "text"), "")

    def check_ids(self) -> None:
        """Assert that ids strictly increase."""
        assert all(a < b for a, b in zip(self.ids, self.ids[1:], strict=False)), self.ids


class Stream:
    """A streaming response being read event by event."""

    def __init__(self, connection: Connection, head: Head) -> None:
        self.connection = connection
        self.head = head
        self.parser = SSEParser()
        self.transcript = Transcript()
        self._pieces = connection.pieces(head)
        self._pending: list[Event] = []

    @property
    def id(self) -> str:
        """The stream's id, known from the headers on."""
        return self.head.headers["x-request-id"]

    async def events(self) -> AsyncIterator[Event]:
        """The events as they come; a later call goes on where this one was left."""
        while True:
            while self._pending:
                event = self._pending.pop(0)
                self.transcript.add(event)
                yield event
            piece = await anext(self._pieces, None)
            if piece is None:
                return
            self._pending = self.parser.feed(piece)

    async def to_end(self) -> Transcript:
        """Read on to the end of the response."""
        async for _ in self.events():
            pass
        self.transcript.check_ids()
        return self.transcript

    async def read_events(self, count: int) -> None:
        """Read until the stream has sent `count` events more."""
        goal = self.transcript.num_events + count
        async for _ in self.events():
            if self.transcript.num_events >= goal:
                return
        raise AssertionError(f"the stream ended after {self.transcript.num_events} events")

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self.connection.close()


async def open_stream(
    port: int,
    body: Mapping[str, Any] | None = None,
    *,
    stream_id: str | None = None,
    after: int | None = None,
    headers: Mapping[str, str] | None = None,
    receive_buffer_bytes: int | None = None,
    path: str = "/api/chat/completions",
) -> Stream:
    """POST `body`, or attach to `stream_id`; returns once the headers are there, which are a 200's."""
    connection = await Connection.to(port, receive_buffer_bytes=receive_buffer_bytes)
    sent = dict(headers or {})
    if after is not None:
        sent["last-event-id"] = str(after)
    if stream_id is None:
        await connection.request("POST", path, body, sent)
    else:
        await connection.request("GET", f"{path}/{stream_id}", None, sent)
    head = await connection.head()
    if head.status != 200:
        body_bytes = b"".join([p async for p in connection.pieces(head)])
        connection.close()
        raise AssertionError(f"{head.status}: {body_bytes!r}")
    return Stream(connection, head)
