"""Reads a recorded HTTP/1.1 answer: head, chunked body, SSE frames, each frame with its arrival time.

The load generator only records reads while the clock runs; this parser works on the record afterwards,
wherever the reads happened to be cut. It assumes chunked transfer encoding for streams, which uvicorn
uses for both servers, and falls back to the plain body for answers that are not streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple


class Read(NamedTuple):
    """What one `recv` returned, and when (seconds on a monotonic clock)."""

    at_s: float
    payload: bytes


class Frame(NamedTuple):
    """One SSE data event: its `data`, and the arrival of the read that completed it."""

    at_s: float
    data: bytes


class Answer(NamedTuple):
    """One HTTP answer: its status, its data frames and the size of its body."""

    status: int
    frames: list[Frame]
    body_bytes: int
    body_head: bytes


def parse_answer(reads: Iterable[Read]) -> Answer:
    """The answer recorded in `reads`, which hold exactly one."""
    pending = iter(reads)
    head, rest = _split_head(pending)
    lines = head.split(b"\r\n")
    status = int(lines[0].split(b" ", 2)[1])
    chunked = any(line.lower() == b"transfer-encoding: chunked" for line in lines[1:])
    body = _dechunked(rest, pending) if chunked else _chain(rest, pending)
    frames: list[Frame] = []
    body_bytes, body_head, buffer = 0, b"", b""
    for at_s, payload in body:
        body_bytes += len(payload)
        body_head = (body_head + payload)[:500] if len(body_head) < 500 else body_head
        buffer += payload
        *events, buffer = buffer.split(b"\n\n")
        frames.extend(Frame(at_s, data) for event in events if (data := _event_data(event)) is not None)
    return Answer(status, frames, body_bytes, body_head)


def _split_head(reads: Iterator[Read]) -> tuple[bytes, Read]:
    received = b""
    for at_s, payload in reads:
        received += payload
        head, end, rest = received.partition(b"\r\n\r\n")
        if end:
            return head, Read(at_s, rest)
    raise ValueError("the connection ended within the answer's head")


def _chain(first: Read, rest: Iterator[Read]) -> Iterator[Read]:
    yield first
    yield from rest


def _dechunked(first: Read, rest: Iterator[Read]) -> Iterator[Read]:
    buffer = b""
    for at_s, payload in _chain(first, rest):
        buffer += payload
        taken, body = 0, []
        while (line_end := buffer.find(b"\r\n", taken)) >= 0:
            size = int(buffer[taken:line_end].split(b";")[0], 16)
            start = line_end + 2
            if len(buffer) < start + size + 2:
                break
            body.append(buffer[start : start + size])
            taken = start + size + 2
        buffer = buffer[taken:]
        if body:
            yield Read(at_s, b"".join(body))


def _event_data(event: bytes) -> bytes | None:
    """The `data` of one event, several lines joined (WHATWG HTML 9.2.6); None for comments only."""
    lines = [line[5:].removeprefix(b" ") for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines) if lines else None
