"""Segments: runs of a stream's events as bytes, in which the store keeps a ring (app.stream.ring).

    version, 1 byte  crc32 of what follows, 4 bytes  header as JSON, one line  columns

    header   {"first_id", "names": tracks, "specials": control events as [[index, kind, fields]…],
              "columns": [[name, type, bytes]…]}
    columns  lanes, lengths, text; logprobs, logprob_lengths, counts if the ring has them

A segment can be read without the segments before it. Numbers are little-endian. A column whose numbers all
fit into one byte takes one byte a number, so that an event costs its text and two bytes.
"""

from __future__ import annotations

import sys
import zlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from app.core import Channel

_VERSION = b"\x01"
_HEAD_BYTES = 5
_TRACKS, _CONTROL_EVENTS = "lanes", "specials"  # their names in version 1
_WIDTHS = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32))


@dataclass(frozen=True, slots=True)
class Segment:
    """Events from `first_id` on, column by column; track 0 is a control event."""

    first_id: int
    names: Sequence[tuple[int, Channel, int]]
    """Choice, channel and tool of track 1, 2, …"""
    control_events: Sequence[tuple[int, str, Any]]
    """Index and kind of each control event, and the event or its fields."""
    tracks: Sequence[int]
    lengths: Sequence[int]
    text: bytes
    logprobs: bytes | None = None
    logprob_lengths: Sequence[int] | None = None
    counts: Sequence[int] | None = None
    """Four numbers an event, in the order of app.core.Counts."""


def pack(segment: Segment) -> bytes:
    """The bytes of a segment."""
    columns = list(_columns(segment))
    header = orjson.dumps(
        {
            "first_id": segment.first_id,
            "names": list(map(tuple, segment.names)),
            _CONTROL_EVENTS: segment.control_events,
            "columns": [(name, kind, len(data)) for name, kind, data in columns],
        }
    )
    content = b"".join((header, b"\n", *(data for _, _, data in columns)))
    return _VERSION + zlib.crc32(content).to_bytes(4, "little") + content


def unpack(raw: bytes) -> Segment:
    """The segment in bytes made by `pack`. Raises ValueError if they are damaged."""
    if raw[:1] != _VERSION:
        raise ValueError("a segment of an unknown version")
    content = raw[_HEAD_BYTES:]
    if raw[1:_HEAD_BYTES] != zlib.crc32(content).to_bytes(4, "little"):
        raise ValueError("a damaged segment")
    end = content.index(b"\n")
    header = orjson.loads(content[:end])
    columns: dict[str, Any] = {}
    start = end + 1
    for name, kind, size in header.pop("columns"):
        columns[name] = _numbers(kind, content[start : start + size])
        start += size
    columns["tracks"] = columns.pop(_TRACKS)
    header["names"] = [tuple(name) for name in header["names"]]
    header["control_events"] = header.pop(_CONTROL_EVENTS)
    return Segment(**header, **columns)


def _columns(segment: Segment) -> Iterator[tuple[str, str, bytes]]:
    yield _TRACKS, *_narrow(segment.tracks)
    yield "lengths", *_narrow(segment.lengths)
    yield "text", "", segment.text
    if segment.logprobs is not None and segment.logprob_lengths is not None:
        yield "logprobs", "", segment.logprobs
        yield "logprob_lengths", *_narrow(segment.logprob_lengths)
    if segment.counts is not None:
        yield "counts", *_narrow(segment.counts)


def _narrow(numbers: Sequence[int]) -> tuple[str, bytes]:
    """The numbers in the narrowest type that holds them all, and its name."""
    largest = max(numbers, default=0)
    kind = next(name for name, limit in _WIDTHS if largest < limit)
    return kind, _little_endian(array(kind, numbers)).tobytes()


def _numbers(kind: str, data: bytes) -> Sequence[int]:
    if not kind:
        return data
    numbers = array(kind)
    numbers.frombytes(data)
    return _little_endian(numbers)


def _little_endian(numbers: array[int]) -> array[int]:
    if sys.byteorder == "big":
        numbers.byteswap()
    return numbers
