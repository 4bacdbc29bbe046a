"""Segments: runs of a stream's events as bytes, in which the store keeps a ring (app.stream.ring).

    version, 1 byte  crc32 of what follows, 4 bytes  header as JSON, one line  columns

    header   {"first_id", "names": tracks, "specials": [[index, kind, fields]…],
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
_WIDTHS = (("B", 1 << 8), ("H", 1 << 16), ("I", 1 << 32))


@dataclass(frozen=True, slots=True)
class Segment:
    """Events from `first_id` on, column by column; track 0 is a control event."""

    first_id: int
    names: Sequence[tuple[int, Channel, int]]
    """Choice, channel and tool of track 1, 2, …"""
    specials: Sequence[tuple[int, str, Any]]
    """Index and kind of each control event, and the event or its fields."""
    tracks: Sequence[int]
    lengths: Sequence[int]
    text: bytes
    logprobs: bytes | None = None
    logprob_lengths: Sequence[int] | None = None
    counts: Sequence[int] | None = None
    """Four numbers an event, in the order of app.core.Counts."""

    def with_last(self, kind: str, event: Any) -> Segment:
        """The segment with a control event added at its end."""
        return Segment(
            self.first_id,
            self.names,
            [*self.specials, (len(self.tracks), kind, event)],
            [*self.tracks, 0],
            [*self.lengths, 0],
            self.text,
            self.logprobs,
            None if self.logprob_lengths is None else [*self.logprob_lengths, 0],
            None if self.counts is None else [*self.counts, 0, 0, 0, 0],
        )

    def without_first(self, num_events: int) -> Segment:
        """The segment without its first `num_events` events."""
        logprobs, logprob_lengths = self.logprobs, self.logprob_lengths
        if logprobs is not None and logprob_lengths is not None:
            logprobs = logprobs[sum(logprob_lengths[:num_events]) :]
            logprob_lengths = logprob_lengths[num_events:]
        return Segment(
            self.first_id + num_events,
            self.names,
            [(i - num_events, kind, fields) for i, kind, fields in self.specials if i >= num_events],
            self.tracks[num_events:],
            self.lengths[num_events:],
            self.text[sum(self.lengths[:num_events]) :],
            logprobs,
            logprob_lengths,
            None if self.counts is None else self.counts[4 * num_events :],
        )


def pack(piece: Segment) -> bytes:
    """The bytes of a segment."""
    columns = list(_columns(piece))
    header = orjson.dumps(
        {
            "first_id": piece.first_id,
            "names": list(map(tuple, piece.names)),
            "specials": piece.specials,
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
    columns["tracks"] = columns.pop("lanes")  # their name on disk since the first version
    header["names"] = [tuple(name) for name in header["names"]]
    return Segment(**header, **columns)


def _columns(piece: Segment) -> Iterator[tuple[str, str, bytes]]:
    yield "lanes", *_narrow(piece.tracks)
    yield "lengths", *_narrow(piece.lengths)
    yield "text", "", piece.text
    if piece.logprobs is not None and piece.logprob_lengths is not None:
        yield "logprobs", "", piece.logprobs
        yield "logprob_lengths", *_narrow(piece.logprob_lengths)
    if piece.counts is not None:
        yield "counts", *_narrow(piece.counts)


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
