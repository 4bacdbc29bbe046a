"""The crash test's clients obey the server's pace as any other client does."""

from __future__ import annotations

import asyncio

from scripts.crash.http import get_json, get_text

REFUSED = b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 0\r\ncontent-length: 2\r\n\r\n{}"
ANSWERED = b'HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n{"a": 174}'
GONE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 2\r\n\r\n{}"


async def serving(*answers: bytes) -> tuple[asyncio.Server, int, list[bytes]]:
    """A server that gives these answers in turn, its port, and the heads that it has read."""
    left, heads = list(answers), list[bytes]()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(left.pop(0))
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    return server, server.sockets[0].getsockname()[1], heads


async def test_a_read_that_comes_too_often_is_sent_again() -> None:
    """As often as it takes, with the same path and headers; the answer is the one that is not 429."""
    server, port, heads = await serving(REFUSED, REFUSED, ANSWERED)
    async with server:
        assert await get_json(port, "/api/usage", {"x-a": "b"}) == (200, {"a": 174})
    assert len(heads) == 3
    assert len(set(heads)) == 1
    assert b"GET /api/usage " in heads[0]
    assert b"x-a: b" in heads[0]


async def test_every_other_status_is_an_answer() -> None:
    """It is judged, and not asked for again."""
    server, port, heads = await serving(GONE, ANSWERED)
    async with server:
        assert await get_json(port, "/x") == (404, {})
        assert await get_text(port, "/x") == '{"a": 174}'
    assert len(heads) == 2
