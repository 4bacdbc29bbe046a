"""The load's client against a server that says exactly what it is told to, byte by byte where it matters."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable

import pytest

from scripts.benchmarks.asking import Asker, Attempt
from scripts.benchmarks.crowd import Crowd

USAGE = b'{"prompt_tokens":9,"completion_tokens":2,"prompt_tokens_details":{"cached_tokens":4}}'
STREAM = (
    b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n',
    b'data: {"choices":[{"delta":{"content":"Hi"}}]}\n\n',
    b'data: {"choices":[{"delta":{},"finish_reason":"stop"}]}\n\n',
    b'data: {"usage":' + USAGE + b"}\n\n",
    b"data: [DONE]\n\n",
)
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
BODY = b'{"error":{"code":"overloaded"}}'
FULL = b"HTTP/1.1 503 x\r\ncontent-length: %d\r\nretry-after: 0\r\nx-should-retry: %s\r\n\r\n" + BODY


def streamed(*frames: bytes) -> bytes:
    """A whole answer in chunks."""
    return HEAD + b"".join(b"%x\r\n%s\r\n" % (len(one), one) for one in frames) + b"0\r\n\r\n"


def refused(again: bytes = b"true") -> bytes:
    """A whole refusal."""
    return FULL % (len(BODY), again)


async def served(answers: list[bytes], ask: Callable[[Asker], Awaitable[None]], cut: int = 0) -> int:
    """Run `ask` against a server that gives these answers, in pieces of `cut` bytes; how many it gave."""
    given = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal given
        while answers:
            with contextlib.suppress(asyncio.IncompleteReadError):
                await reader.readuntil(b"{}")
            if reader.at_eof():
                break
            answer = answers.pop(0)
            for at in range(0, len(answer), cut or len(answer)):
                writer.write(answer[at : at + (cut or len(answer))])
                await writer.drain()
                await asyncio.sleep(0)
            given += 1
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    asker = Asker(server.sockets[0].getsockname()[1], ["key"])
    await ask(asker)
    asker.close()
    server.close()
    return given


@pytest.mark.parametrize("cut", [0, 1, 7])
async def test_an_answer_is_read_wherever_it_is_cut(cut: int) -> None:
    """Status, first content, usage and end, whole or in pieces; two answers over one connection."""
    seen: list[Attempt] = []

    async def ask(asker: Asker) -> None:
        seen.extend([await asker.ask(0, b"{}"), await asker.ask(0, b"{}")])

    await served([streamed(*STREAM), streamed(*STREAM)], ask, cut)
    for one in seen:
        assert one.whole
        assert one.served_tokens == 9 - 4 + 2
        if not cut:
            assert 0 < one.ttft_s <= one.took_s < 10
            assert one.frames == len(STREAM)


async def test_an_error_within_a_stream_is_no_answer() -> None:
    """A stream that ends with an error event is not whole, and has the error's code."""
    seen: list[Attempt] = []

    async def ask(asker: Asker) -> None:
        seen.append(await asker.ask(0, b"{}"))

    await served([streamed(*STREAM[:2], b'data: {"error":{"code":"engine_failed"}}\n\n')], ask)
    assert (seen[0].status, seen[0].code, seen[0].whole) == (200, "engine_failed", False)


async def test_a_closed_connection_is_made_again_or_told() -> None:
    """A kept connection that the server has closed is replaced; one that breaks within an answer counts."""
    seen: list[Attempt] = []

    async def ask(asker: Asker) -> None:
        seen.append(await asker.ask(0, b"{}"))
        seen.append(await asker.ask(0, b"{}"))

    await served([streamed(*STREAM), HEAD + b"5\r\nda"], ask)
    assert seen[0].whole
    assert (seen[1].whole, seen[1].code) == (False, "connection")


@pytest.mark.parametrize(
    ("obeys", "again", "attempts"), [(True, b"true", 2), (True, b"false", 1), (False, b"true", 1)]
)
async def test_who_obeys_comes_back_when_told(obeys: bool, again: bytes, attempts: int) -> None:
    """Only who obeys, and only unless told not to."""
    crowds: list[Crowd] = []

    async def ask(asker: Asker) -> None:
        crowd = Crowd(asker, lambda _key: b"{}", random.Random(1))
        crowds.append(crowd)
        await crowd.once(0, obeys=obeys)

    await served([refused(again), streamed(*STREAM)], ask)
    made = crowds[0].requests[0].attempts
    assert len(made) == attempts
    assert (made[0].status, made[0].code) == (503, "overloaded")
    assert made[-1].whole == (attempts == 2)
