"""The ring: what is put in comes out, from any cursor, in any framing."""

from __future__ import annotations

from dataclasses import dataclass, field

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.core import Counts, Delta, ToolCall
from app.stream.ring import Done, ExtraChunk, Failed, Finished, Opened, Ring, TextRun, TextTrack, ToolStarted

BIG = 10**9
TRACKS = (
    TextTrack(0, "reasoning"),
    TextTrack(0, "text"),
    TextTrack(0, "tool", 0),
    TextTrack(0, "tool", 1),
    TextTrack(1, "text"),
)
RANK = {"reasoning": 0, "text": 1, "tool": 2}


def delta(text: str, track: TextTrack = TRACKS[1], **fields) -> Delta:
    """A delta of one track."""
    tool = ToolCall(track.tool_index) if track.channel == "tool" else None
    return Delta(track.choice, track.channel, text, (), fields.pop("counts", Counts()), tool=tool, **fields)


def unescaped(part: TextRun) -> str:
    """The text of a part."""
    return orjson.loads(b'"' + part.text + b'"')


@dataclass
class Reading:
    """What a reader has understood of a ring."""

    cursor: int = 0
    ids: list[int] = field(default_factory=list)
    text: dict[TextTrack, str] = field(default_factory=dict)
    control_events: list[object] = field(default_factory=list)

    def step(self, ring: Ring) -> None:
        self.cursor, content = ring.after(self.cursor)
        self.ids.append(self.cursor)
        if not isinstance(content, list | tuple):
            self.control_events.append(content)
            return
        order: dict[int, list[int]] = {}
        for part in content:
            order.setdefault(part.track.choice, []).append(RANK[part.track.channel])
            self.text[part.track] = self.text.get(part.track, "") + unescaped(part)
        assert all(ranks == sorted(ranks) for ranks in order.values()), "reasoning, text, tool"
        assert len({part.track for part in content}) == len(content), "one part per track"


# Any text an engine may give, less the lone surrogates that UTF-8 cannot carry.
text = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
long_text = st.text(st.characters(exclude_categories=["Cs"]), max_size=300)
events = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(TRACKS), text),
        st.integers(0, 1).map(lambda choice: Finished(choice, "stop", None)),
    ),
    max_size=40,
)


@given(events=events, walks=st.lists(st.lists(st.integers(1, 45), max_size=20), min_size=1, max_size=4))
def test_any_walk_reads_the_appended_text(events, walks):
    """Readers that step at any times, between any appends, all end with the same text and order."""
    ring = Ring(BIG)
    ring.append_control(Opened(2))
    readings = [Reading() for _ in walks]
    expected: dict[TextTrack, str] = {}
    for number, event in enumerate(events, start=1):
        if isinstance(event, Finished):
            ring.append_control(event)
        else:
            track, piece = event
            ring.append(delta(piece, track))
            expected[track] = expected.get(track, "") + piece
        for reading, walk in zip(readings, walks, strict=True):
            for _ in range(walk.count(number)):
                if reading.cursor < ring.last_id:
                    reading.step(ring)
    ring.append_control(Done())
    for reading in readings:
        while reading.cursor < ring.last_id:
            reading.step(ring)
        assert reading.text == expected
        assert reading.ids == sorted(set(reading.ids))
        assert reading.ids[-1] == ring.last_id == len(events) + 2
        assert reading.control_events == [Opened(2), *(e for e in events if isinstance(e, Finished)), Done()]


@given(pieces=st.lists(text, min_size=1, max_size=40), data=st.data())
def test_text_after_a_cursor_is_the_rest(pieces, data):
    """From any cursor on, a late reader gets exactly the events after it."""
    ring = Ring(BIG)
    for piece in pieces:
        ring.append(delta(piece))
    cursor = data.draw(st.integers(0, len(pieces) - 1))
    reading = Reading(cursor)
    while reading.cursor < ring.last_id:
        reading.step(ring)
    assert reading.text[TextTrack(0, "text")] == "".join(pieces[cursor:])
    assert reading.ids[0] > cursor


@given(
    pieces=st.lists(long_text, min_size=1, max_size=200),
    plain=st.booleans(),
)
def test_trimmed_ring_is_bounded_and_keeps_the_newest(pieces, plain):
    """Over its limit a ring drops its oldest events, keeps ids, and what is left is right."""
    ring = Ring(4096, logprobs=not plain, counts=not plain)
    for number, piece in enumerate(pieces, start=1):
        entry = [{"token": piece, "logprob": -1.0}]
        ring.append(delta(piece, counts=Counts(1, number), logprobs=None if plain else entry))
        newest = len(orjson.dumps(piece)) * (1 if plain else 2) + 200
        assert ring.nbytes <= 4096 + newest
        assert ring.last_id == number
    reading = Reading(ring.first_id - 1)
    while reading.cursor < ring.last_id:
        reading.step(ring)
    assert reading.text[TextTrack(0, "text")] == "".join(pieces[ring.first_id - 1 :])


def test_counts_of_every_event_are_within_the_limit():
    """Counts kept for continuous usage are memory too: the limit holds for them."""
    ring = Ring(64 * 1024, counts=True)
    for number in range(5_000):
        ring.append(delta("word ", counts=Counts(1, number)))
    assert ring.nbytes <= 64 * 1024
    _, (part,) = ring.after(ring.last_id - 1)
    assert part.counts == Counts(1, 4_999)


def test_coalesced_counts_are_the_newest():
    """A frame over several events has the counts of the last of them."""
    ring = Ring(BIG, counts=True)
    for number in (1, 2, 3):
        ring.append(delta("x", counts=Counts(7, number)))
    last_id, (part,) = ring.after(0)
    assert (last_id, part.counts) == (3, Counts(7, 3))


@given(
    choices=st.lists(st.integers(0, 3), min_size=1, max_size=30),
    walks=st.lists(st.lists(st.integers(1, 30), max_size=10), min_size=2, max_size=3),
)
def test_counts_at_an_event_are_those_of_all_choices(choices, walks):
    """However events share frames, what a reader is told at an event is what all choices had by then."""
    ring, expected, so_far = Ring(BIG, counts=True), {}, dict.fromkeys(range(4), 0)
    for event_id, choice in enumerate(choices, start=1):
        so_far[choice] += 1
        ring.append(delta("x", TextTrack(choice, "text"), counts=Counts(7, so_far[choice])))
        expected[event_id] = Counts(7, sum(so_far.values()))
    for starts in (*walks, []):
        for cursor in {0, *(start for start in starts if start < len(choices))}:
            last_id, parts = ring.after(cursor)
            assert {part.counts for part in parts} == {expected[last_id]}


def test_logprobs_keep_to_their_text():
    """Logprobs are sliced and joined with the events they belong to, absent ones too."""
    ring = Ring(BIG, logprobs=True)
    for number in range(6):
        entry = None if number == 2 else [{"token": str(number)}, {"token": f"{number}b"}]
        ring.append(delta(str(number), logprobs=entry))
    _, (part,) = ring.after(1)
    tokens = [entry["token"] for entry in orjson.loads(b"[" + part.logprobs + b"]")]
    assert tokens == ["1", "1b", "3", "3b", "4", "4b", "5", "5b"]
    _, (last,) = ring.after(5)
    assert orjson.loads(b"[" + last.logprobs + b"]") == [{"token": "5"}, {"token": "5b"}]


def test_frame_has_a_size():
    """A reader that lags by megabytes gets them in frames of bounded size, in order."""
    ring = Ring(BIG)
    for _ in range(3000):
        ring.append(delta("x" * 1000))
        ring.append(delta("y" * 1000, TextTrack(1, "text")))
    reading, sizes = Reading(), []
    while reading.cursor < ring.last_id:
        before = sum(map(len, reading.text.values()))
        reading.step(ring)
        sizes.append(sum(map(len, reading.text.values())) - before)
    assert max(sizes) < 600_000
    assert reading.text == {TextTrack(0, "text"): "x" * 3_000_000, TextTrack(1, "text"): "y" * 3_000_000}


def test_order_within_a_choice_is_never_turned_round():
    """Reasoning after text begins a frame of its own; another choice's does not."""
    ring = Ring(BIG)
    for channel in ("text", "reasoning", "text"):
        ring.append(delta(channel[0], TextTrack(0, channel)))
    assert [ring.after(i)[0] for i in (0, 1)] == [1, 3]
    ring = Ring(BIG)
    ring.append(delta("a", TextTrack(0, "text")))
    ring.append(delta("b", TextTrack(1, "reasoning")))
    assert ring.after(0)[0] == 2


def test_control_event_is_a_step_of_its_own():
    """Text is not merged across an event that is not text."""
    ring = Ring(BIG)
    ring.append(delta("a"))
    ring.append_control(ToolStarted(0, ToolCall(0, "id", "name")))
    ring.append(delta("b"))
    assert [ring.after(i)[0] for i in range(3)] == [1, 2, 3]


@given(events=st.lists(st.tuples(st.sampled_from(TRACKS), text), max_size=40))
def test_whole_is_all_text_by_track(events):
    """The answer in one piece is the same text as the frames."""
    ring = Ring(BIG)
    expected: dict[TextTrack, str] = {}
    for track, piece in events:
        ring.append(delta(piece, track))
        expected[track] = expected.get(track, "") + piece
    parts, control_events = ring.contents()
    assert {track: unescaped(part) for track, part in parts.items()} == expected
    assert not control_events


@pytest.mark.parametrize("hostile", ["\ud800", "a\udfffb", '"\\\x00\x1f\u2028\u2029\x7f', "\U0001f600"])
def test_any_text_is_valid_json(hostile: str):
    """Control characters, quotes, line separators and lone surrogates leave the JSON whole."""
    ring = Ring(BIG)
    ring.append(delta("before "))
    ring.append(delta(hostile))
    ring.append(delta(" after"))
    _, (part,) = ring.after(0)
    read = unescaped(part)
    assert read.startswith("before ")
    assert read.endswith(" after")
    if hostile.isprintable() or "\x00" in hostile:
        assert read == f"before {hostile} after"


def test_memory_is_as_stated():
    """`nbytes` is within a quarter of what Python really allocates."""
    import tracemalloc

    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    ring = Ring(BIG)
    for number in range(20_000):
        ring.append(delta(f"word{number} "))
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    assert 0.75 < held / ring.nbytes < 1.25


CONTROL_EVENTS = (
    Finished(0, "stop", 128009),
    Finished(1, "length", "\u2028END"),
    ToolStarted(0, ToolCall(1, "call_1", "weather")),
    ExtraChunk("usage", {"prompt_tokens": 3, "x": [1.5, None, {"y": "\U0001f600"}]}),
    Failed({"error": {"message": "no", "code": "internal_error", "param": None}}),
)
counts = st.builds(Counts, *[st.integers(0, 2**31 - 1)] * 4)  # of two choices at most, which are summed
entries = st.one_of(st.none(), st.lists(st.builds(dict, token=text, logprob=st.floats(-99, 0)), max_size=3))
any_events = st.lists(
    st.one_of(
        st.sampled_from(CONTROL_EVENTS),
        st.builds(lambda track, *rest: (track, *rest), st.sampled_from(TRACKS), long_text, counts, entries),
    ),
    max_size=40,
)


def fill(ring: Ring, events) -> None:
    """Append what `any_events` gave."""
    for event in events:
        if isinstance(event, tuple):
            track, piece, of_event, logprobs = event
            ring.append(delta(piece, track, counts=of_event, logprobs=logprobs))
        else:
            ring.append_control(event)


def same(restored: Ring, ring: Ring, cursors) -> None:
    """Every step from every cursor is the same, and the whole too."""
    assert restored.last_id == ring.last_id
    assert restored.text_only == ring.text_only
    for cursor in cursors:
        (last_id, content), (expected_id, expected) = restored.after(cursor), ring.after(cursor)
        assert last_id == expected_id
        if isinstance(expected, list | tuple):
            content, expected = list(content), list(expected)
        assert content == expected


@given(events=any_events, cuts=st.sets(st.integers(1, 41)), logprobs=st.booleans(), has_counts=st.booleans())
def test_segments_restore_the_ring(events, cuts, logprobs, has_counts):
    """Cut into segments anywhere, a ring comes back the same after every cursor, and as a whole."""
    ring = Ring(BIG, logprobs=logprobs, counts=has_counts)
    ring.append_control(Opened(2))
    dumped, last_id = [], 0
    for number, event in enumerate(events, start=1):
        fill(ring, [event])
        if number in cuts:
            first_id, piece = ring.dump(last_id)
            assert first_id == last_id + 1
            dumped.append(piece)
            last_id = ring.last_id
            assert ring.dump(last_id) is None
    dumped += [ring.dump(last_id)[1]] if last_id < ring.last_id else []
    restored = Ring.restore(dumped, BIG)
    assert restored.first_id == 1
    same(restored, ring, range(ring.last_id))
    assert restored.contents() == ring.contents()
    assert list(restored.contents()[0]) == list(ring.contents()[0])


@given(events=any_events, data=st.data(), both=st.booleans())
def test_segments_that_overlap_count_once(events, data, both):
    """Events that two segments both have are restored once."""
    ring = Ring(BIG, logprobs=both, counts=both)
    ring.append_control(Opened(1))
    dumped = []
    for event in events:
        if data.draw(st.booleans()):
            dumped.append(ring.dump(data.draw(st.integers(0, ring.last_id - 1))))
        fill(ring, [event])
    dumped.append(ring.dump(0))
    dumped.sort()
    dumped.insert(0, ring.dump(0) if data.draw(st.booleans()) else dumped[0])
    restored = Ring.restore([piece for _, piece in dumped], BIG)
    same(restored, ring, range(restored.first_id - 1, ring.last_id))


def test_segment_of_a_trimmed_ring_begins_where_the_ring_does():
    """What has left the ring is in no segment of it; ids stay."""
    ring = Ring(4096)
    for number in range(1000):
        ring.append(delta(f"{number} "))
    first_id, piece = ring.dump(0)
    assert first_id == ring.first_id > 1
    restored = Ring.restore([piece], BIG)
    assert restored.first_id == first_id
    same(restored, ring, range(first_id - 1, ring.last_id))


def test_gap_between_segments_ends_what_is_held():
    """What lies before a gap cannot be joined with what follows it: it has left the ring."""
    ring = Ring(BIG)
    fill(ring, [(TRACKS[1], f"{number} ", Counts(), None) for number in range(9)])
    _, last = ring.dump(6)
    ring = Ring(BIG)
    fill(ring, [(TRACKS[1], "0 ", Counts(), None)])
    first = ring.dump(0)[1]
    restored = Ring.restore([first, last], BIG)
    assert (restored.first_id, restored.last_id) == (7, 9)
    prefix = Ring.restore([first, last], BIG, only_prefix=True)
    assert (prefix.first_id, prefix.last_id) == (1, 1)
    assert Ring.restore([last], BIG, only_prefix=True).last_id == 0


def test_restored_ring_keeps_its_limit():
    """Segments beyond the limit restore to the newest events within it."""
    ring = Ring(BIG)
    dumped = []
    for number in range(10_000):
        ring.append(delta(f"{number} "))
        if number % 100 == 99:
            dumped.append(ring.dump(number - 99)[1])
    restored = Ring.restore(dumped, 16 * 1024)
    assert restored.nbytes <= 16 * 1024
    assert restored.last_id == 10_000
    same(restored, ring, range(restored.first_id - 1, ring.last_id, 97))


def test_restored_ring_goes_on():
    """Events appended to a restored ring follow the last one, in their tracks."""
    ring = Ring(BIG)
    fill(ring, [(TRACKS[1], "a", Counts(), None), (TRACKS[4], "b", Counts(), None)])
    restored = Ring.restore([ring.dump(0)[1]], BIG)
    restored.append(delta("c"))
    assert [unescaped(part) for part in restored.after(0)[1]] == ["ac", "b"]
    assert restored.last_id == 3


def test_no_segments_restore_to_an_empty_ring():
    """Nothing kept is nothing held."""
    ring = Ring.restore([], BIG)
    assert (ring.first_id, ring.last_id, ring.dump(0)) == (1, 0, None)


def test_ring_begins_at_any_id():
    """An empty ring may stand for a position: its first event follows it."""
    ring = Ring(BIG, first_id=42)
    assert ring.last_id == 41
    ring.append_control(Done())
    assert ring.after(41) == (42, Done())


@given(data=st.data())
def test_damaged_segment_is_refused(data):
    """A segment with any byte changed or missing is an error, never other text."""
    ring = Ring(BIG)
    ring.append_control(Opened(1))
    ring.append(delta("hello"))
    _, piece = ring.dump(0)
    place = data.draw(st.integers(0, len(piece) - 1))
    changed = bytearray(piece)
    changed[place] ^= data.draw(st.integers(1, 255))
    for damaged in (bytes(changed), piece[:place]):
        with pytest.raises(ValueError, match=r"damaged segment|unknown version"):
            Ring.restore([damaged], BIG)


def test_segments_of_different_streams_are_refused():
    """Segments with and without counts are not of one stream."""
    plain, counted = Ring(BIG), Ring(BIG, counts=True, first_id=2)
    plain.append(delta("a"))
    counted.append(delta("b"))
    with pytest.raises(ValueError, match="different streams"):
        Ring.restore([plain.dump(0)[1], counted.dump(0)[1]], BIG)


def test_segment_costs_two_bytes_an_event():
    """Beside its text an event takes two bytes in a segment, and a segment some 200."""
    ring = Ring(BIG)
    for _ in range(1000):
        ring.append(delta("word "))
    assert len(ring.dump(0)[1]) < 1000 * 7 + 200
