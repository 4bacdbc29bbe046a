"""Segments of stored events: bytes and back."""

import pytest

from app.stream.segment import Segment, pack, unpack

PLAIN = Segment(1, [(0, "text", 0)], [(0, "opened", {})], [0, 1, 1], [0, 2, 3], b"heyou")
FULL = Segment(
    7,
    [(0, "text", 0), (1, "reasoning", 0)],
    [(2, "finished", {"choice": 0, "reason": "stop"})],
    [1, 2, 0],
    [300, 1, 0],
    b"x" * 301,
    b"[1]",
    [3, 0, 0],
    [1, 2, 3, 70_000] * 3,
)


def columns(segment: Segment) -> tuple[object, ...]:
    """All fields, with sequences of any type as lists."""
    lists = [
        list(c) if c is not None else None
        for c in (segment.tracks, segment.lengths, segment.logprob_lengths, segment.counts)
    ]
    control_events = [tuple(event) for event in segment.control_events]
    return segment.first_id, list(segment.names), control_events, *lists, segment.text, segment.logprobs


@pytest.mark.parametrize("segment", [PLAIN, FULL])
def test_a_segment_comes_back_from_its_bytes(segment: Segment) -> None:
    """Numbers of one, two and four bytes, with logprobs and counts or without."""
    assert columns(unpack(pack(segment))) == columns(segment)


@pytest.mark.parametrize("position", [0, 1, 5, 40, -1])
def test_a_changed_byte_is_found(position: int) -> None:
    """Damage is an error, and never another text."""
    raw = bytearray(pack(FULL))
    raw[position] ^= 1
    with pytest.raises(ValueError, match=r"damaged segment|unknown version"):
        unpack(bytes(raw))


def test_a_cut_segment_is_found() -> None:
    """A row that was written in part."""
    with pytest.raises(ValueError, match="damaged segment"):
        unpack(pack(FULL)[:-1])
