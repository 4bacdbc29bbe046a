"""A small HTTP/1.1 client that receives a stream to its last complete event, however the server goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any, NamedTuple, Self

Gone = (ConnectionError, asyncio.IncompleteReadError)
"""What a request meets whose server dies."""


class Event(NamedTuple):
    """One data event; `data` is JSON or `[DONE]`."""

    id: int | None
    data: str


class Answer:
    """A response whose head has come."""

    def __init__(self, status: int, headers: Mapping[str, str], body: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._body = body

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises one of `Gone` when it is cut."""
        if self.status == 204:
            return
        if self.headers.get("transfer-encoding") != "chunked":
            yield await self._body.readexactly(int(self.headers["content-length"]))
            return
        while size := int(await _line(self._body), 16):
            while size:  # a chunk cut short is received as far as it came
                piece = await self._body.read(size)
                if not piece:
                    raise ConnectionResetError
                size -= len(piece)
                yield piece
            await self._body.readexactly(2)
        await self._body.readexactly(2)

    async def events(self) -> AsyncIterator[Event]:
        """Server-sent events, dispatched at their blank lines."""
        rest, event_id, data = b"", None, []
        async for piece in self.pieces():
            *lines, rest = (rest + piece).split(b"\n")
            for line in lines:
                name, _, value = line.decode().partition(": ")
                if name == "id":
                    event_id = int(value)
                elif name == "data":
                    data.append(value)
                elif not line and data:
                    yield Event(event_id, "\n".join(data))
                    event_id, data = None, []

    async def json(self) -> Any:
        """The whole body as JSON; None when there is none."""
        body = b"".join([piece async for piece in self.pieces()])
        return json.loads(body) if body else None


class Connection:
    """One connection, for one request."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def to(cls, port: int) -> Self:
        """Connect to the server on this machine. Raises one of `Gone`."""
        return cls(*await asyncio.open_connection("127.0.0.1", port))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_exc: object) -> None:
        self._writer.close()
        with contextlib.suppress(*Gone):
            await self._writer.wait_closed()

    async def ask(
        self,
        method: str,
        path: str,
        body: Mapping[str, Any] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request and read the head of its answer. Raises one of `Gone`."""
        payload = b"" if body is None else json.dumps(body).encode()
        lines = {"host": "localhost", "content-length": str(len(payload)), **(headers or {})}
        head = "".join(f"{name}: {value}\r\n" for name, value in lines.items())
        self._writer.write(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode() + payload)
        status_line, *header_lines = (
            (await self._reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        )
        named = (line.partition(": ") for line in header_lines if line)
        return Answer(int(status_line.split()[1]), {k.lower(): v for k, _, v in named}, self._reader)


@contextlib.asynccontextmanager
async def read(port: int, path: str, headers: Mapping[str, str] | None = None) -> AsyncIterator[Answer]:
    """A GET's answer; one that is refused as too frequent is asked again after its `Retry-After`.

    Raises one of `Gone`.
    """
    while True:
        async with await Connection.to(port) as connection:
            answer = await connection.ask("GET", path, headers=headers)
            if answer.status != HTTPStatus.TOO_MANY_REQUESTS:
                yield answer
                return
            await answer.json()
        await asyncio.sleep(float(answer.headers["retry-after"]))


async def get_json(port: int, path: str, headers: Mapping[str, str] | None = None) -> tuple[int, Any]:
    """Status and body of a GET, as `read` has it. Raises one of `Gone`."""
    async with read(port, path, headers) as answer:
        return answer.status, await answer.json()


async def get_text(port: int, path: str, headers: Mapping[str, str] | None = None) -> str:
    """The body of a GET as text. Raises one of `Gone`."""
    async with read(port, path, headers) as answer:
        return b"".join([piece async for piece in answer.pieces()]).decode()


async def _line(reader: asyncio.StreamReader) -> bytes:
    return await reader.readuntil(b"\r\n")
