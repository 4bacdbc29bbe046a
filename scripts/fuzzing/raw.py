"""Bytes on the socket: valid requests, broken in a few places each."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import time
from typing import NamedTuple

READ_S = 20.0
_VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    2**63,
    1e308,
    "",
    "\ud800",
    "\0",
    [],
    {},
    [[]],
    {"": None},
    "a" * 5000,
)
_BYTES = (b"\r\n", b"\n", b"\0", b"\xff", b":", b" ", b"{", b"[", b'"', b"\\u", b"0x", b"chunked", b"-1")
_PATHS = (
    "POST /v1/chat/completions",
    "POST /api/chat/completions",
    "POST /v1/moderations",
    "POST /api/admin/keys",
    "GET /api/conversations?q=a&cursor=b",
    "GET /api/chat/completions/chatcmpl-1",
    "GET /api/admin/safety?limit=1&cursor=2",
    "GET /api/usage?period=2026-11",
)


class Fault(NamedTuple):
    """What was sent, and what it did."""

    what: str
    sent: bytes


async def healthz_s(port: int) -> float:
    """How long `/healthz` takes to answer, in seconds."""
    began_s = time.monotonic()
    await exchange(port, b"GET /healthz HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
    return time.monotonic() - began_s


async def exchange(port: int, sent: bytes) -> bytes:
    """What comes back, up to the end of the connection, which is closed for writing."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(sent)
        with contextlib.suppress(OSError):
            await writer.drain()
            writer.write_eof()
        async with asyncio.timeout(READ_S):
            return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.transport.abort()


async def fuzz_raw(port: int, key: str, seconds: float, rng: random.Random, slow_s: float) -> list[Fault]:
    """Send broken requests for so long; those that hurt."""
    faults: list[Fault] = []
    sent_number, ends_s = 0, time.monotonic() + seconds
    while time.monotonic() < ends_s:
        sent = broken(rng, key)
        began_s = time.monotonic()
        try:
            answer = await exchange(port, sent)
        except TimeoutError:
            faults.append(Fault("the connection stays open after the client has ended its side", sent))
            continue
        took_s = time.monotonic() - began_s
        sent_number += 1
        if answer.startswith(b"HTTP/1.1 5") and not _may_retry(answer):
            faults.append(Fault(answer[:200].decode("latin-1"), sent))
        if took_s > slow_s:
            faults.append(Fault(f"the answer took {took_s:.1f} s", sent))
        if sent_number % 50 == 0 and await healthz_s(port) > slow_s:
            faults.append(Fault("/healthz is slow", sent))
    print(f"{sent_number} raw requests")
    return faults


def _may_retry(answer: bytes) -> bool:
    return answer.startswith(b"HTTP/1.1 503") and b"retry-after:" in answer.lower()


def broken(rng: random.Random, key: str) -> bytes:
    """A request with JSON that is changed, framing that may be wrong, and a few bytes of it damaged."""
    body = json.dumps(_changed(rng)).encode() if rng.random() < 0.7 else b""
    lines = [f"{rng.choice(_PATHS)} HTTP/1.{rng.choice('1110')}", "host: localhost", "connection: close"]
    if rng.random() < 0.8:
        lines.append(f"authorization: Bearer {key}")
    if rng.random() < 0.2:
        lines.append(f"last-event-id: {rng.choice(['1', '-1', '9' * 15, '9' * 16, 'x', ''])}")
    if rng.random() < 0.3:
        lines.append("transfer-encoding: chunked")
        body = b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    else:
        lines.append(f"content-length: {max(0, len(body) + rng.choice([0] * 8 + [-1, 1]))}")
    sent = bytearray("\r\n".join([*lines, "", ""]).encode() + body)
    for _ in range(rng.choice([0, 0, 1, 2, 5])):
        at = rng.randrange(len(sent))
        sent[at : at + rng.choice([0, 1, 4])] = rng.choice(_BYTES)
    return bytes(sent)


def _changed(rng: random.Random) -> object:
    """A small chat request with some of its values replaced."""
    body: dict[str, object] = {
        "model": "scripted",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 3,
        "stream": rng.random() < 0.3,
    }
    names = [
        *body,
        "stop",
        "n",
        "seed",
        "tools",
        "logit_bias",
        "metadata",
        "conversation_id",
        "input",
        "name",
    ]
    for _ in range(rng.randrange(3)):
        body[rng.choice(names)] = rng.choice(_VALUES)
    if rng.random() < 0.3:
        body["messages"] = [
            {"role": rng.choice(["user", "assistant", "tool"]), "content": rng.choice(_VALUES)}
        ]
    return body
