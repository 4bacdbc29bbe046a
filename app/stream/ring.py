"""The events of one stream as columns: every event's text once, no object per event.

    index   0        1       2       3        4
    track   control  text    text    control  control       which choice and channel
    end     0        5       11      11       11            where the event's text ends
    text    "Hello world"                                   JSON-escaped UTF-8, shared by all readers
    control {0: Opened(…)}           {3: Finished(…)} …

Text is kept JSON-escaped, so that a frame over several events needs no copying. A token costs
its bytes plus six. An event's id is its index plus `first_id`. If the ring exceeds its limit, its older half
is dropped; ids never change. The ring knows events, not frames. `dump` and `restore` carry events over the
end of the process, as segments (app.stream.segment).
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from operator import sub
from typing import Any, NamedTuple

import orjson

from app.core import Channel, Counts, Delta, FinishReason, ToolCall, total_counts
from app.messages import json_escaped
from app.stream.segment import Segment, pack, unpack

_CONTROL = 0
_RANK: Mapping[Channel, int] = {"reasoning": 0, "text": 1, "tool": 2}
_MAX_FRAME_BYTES = 256 * 1024
_EMPTY_BYTES = 3000
"""Bytes of a stream without events, with its wire and bookkeeping; measured with tracemalloc."""
_CONTROL_BYTES = 400
"""Bytes that a control event is counted as; measured with tracemalloc."""


class TextTrack(NamedTuple):
    """The kind of a text: its choice, its channel, and for tool calls the index of the call."""

    choice: int
    channel: Channel
    tool_index: int = 0


TextEvent = tuple[int, TextTrack, bytes]
"""A text event: its id, its track, and its escaped text."""


class TextRun(NamedTuple):
    """Text of one track: JSON-escaped, without quotes; logprobs entries joined by commas.

    `counts` are those of all choices at the last event of the frame, whatever its track. So the counts at
    an event do not depend on how events were joined into frames.
    """

    track: TextTrack
    text: bytes
    logprobs: bytes | None
    counts: Counts | None


@dataclass(frozen=True, slots=True)
class Opened:
    """The stream begins: roles of all choices."""

    n: int


@dataclass(frozen=True, slots=True)
class ToolStarted:
    """A tool call begins; its arguments follow as text."""

    choice: int
    tool: ToolCall


@dataclass(frozen=True, slots=True)
class Finished:
    """A choice has ended."""

    choice: int
    finish_reason: FinishReason
    matched_stop: str | int | None


@dataclass(frozen=True, slots=True)
class ExtraChunk:
    """A chunk without choices, which has one other field: usage, moderation, budget or abandoned."""

    field: str
    value: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Failed:
    """The stream ends in an error; `body` is the error body of app.errors."""

    body: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Done:
    """The last event of a stream."""


ControlEvent = Opened | ToolStarted | Finished | ExtraChunk | Failed | Done
_KINDS: Mapping[str, type[ControlEvent]] = {
    "opened": Opened,
    "tool_started": ToolStarted,
    "finished": Finished,
    "notice": ExtraChunk,
    "failed": Failed,
    "done": Done,
}
"""The names of control events in stored segments. They never change."""
_KIND_OF = {event: kind for kind, event in _KINDS.items()}


class Ring:
    """Events of one stream: appended at the end, read from any id. Used by one event loop only."""

    def __init__(
        self, limit_bytes: int, *, logprobs: bool = False, counts: bool = False, first_id: int = 1
    ) -> None:
        self._limit_bytes = limit_bytes
        self.text_only = not logprobs and not counts
        """True if events have text only, without log probabilities and counts."""
        self.first_id = first_id
        self._tracks = array("H")
        self._ends = array("I")
        self._text = bytearray()
        self._names: list[TextTrack] = []
        self._track_of: dict[tuple[int, Channel, int], int] = {}
        self._control_events: dict[int, ControlEvent] = {}
        self._logprobs = bytearray() if logprobs else None
        self._logprob_ends = array("I")
        self._counts: list[Counts] | None = [] if counts else None
        """The counts of all choices together, at each event."""
        self._counts_of: dict[int, Counts] = {}

    @property
    def last_id(self) -> int:
        """Id of the newest event; `first_id - 1` if there is none."""
        return self.first_id + len(self._tracks) - 1

    @property
    def last(self) -> ControlEvent | None:
        """The newest event if it is a control event; None if it is text or the ring is empty."""
        return self._control_events.get(self.last_id)

    @property
    def nbytes(self) -> int:
        """Memory of the ring in bytes, exact to a few hundred."""
        size = (
            _EMPTY_BYTES
            + len(self._text)
            + 6 * len(self._tracks)
            + _CONTROL_BYTES * len(self._control_events)
        )
        if self._logprobs is not None:
            size += len(self._logprobs) + 4 * len(self._tracks)
        if self._counts is not None:
            size += 96 * len(self._counts)
        return size

    def emptied(self) -> Ring:
        """A ring like this one without its events."""
        return Ring(self._limit_bytes, logprobs=self._logprobs is not None, counts=self._counts is not None)

    def continue_from(self, counts: Mapping[int, Counts]) -> None:
        """Set the counts of each choice at the last event."""
        self._counts_of.update(counts)

    def append(self, delta: Delta) -> TextEvent:
        """Add a delta's text. The caller adds the finish reason as a control event."""
        tool = delta.tool
        key = (delta.choice, delta.channel, 0 if tool is None else tool.index)
        track = self._track_of.get(key)
        if track is None:
            track = self._new_track(key)
        text = json_escaped(delta.text)
        self._text += text
        if self._logprobs is not None and delta.logprobs:
            # Entries of consecutive events are joined by commas: a slice starts with one.
            self._logprobs += b"," + orjson.dumps(delta.logprobs)[1:-1]
        if self._counts is not None:
            self._counts_of[delta.choice] = delta.counts
        return self._push(track), self._names[track - 1], text

    def _new_track(self, key: tuple[int, Channel, int]) -> int:
        self._names.append(TextTrack(*key))
        track = self._track_of[key] = len(self._names)
        return track

    def append_control(self, event: ControlEvent) -> None:
        """Add a control event."""
        self._control_events[self.last_id + 1] = event
        self._push(_CONTROL)

    def _push(self, track: int) -> int:
        """Add an event of a track; returns its id."""
        tracks = self._tracks
        tracks.append(track)
        num_bytes = len(self._text)
        self._ends.append(num_bytes)
        if self._logprobs is not None:
            self._logprob_ends.append(len(self._logprobs))
        if self._counts is not None:
            self._counts.append(total_counts(self._counts_of))
        # The cheap test first: plain events are little but their text.
        if num_bytes + 6 * len(tracks) > self._limit_bytes or not self.text_only:
            self._trim()
        return self.first_id + len(tracks) - 1

    def _trim(self) -> None:
        if self.nbytes <= self._limit_bytes or len(self._tracks) < 2:
            return
        drop = len(self._tracks) // 2
        base = self._ends[drop - 1]
        del self._text[:base]
        self._ends = array("I", (end - base for end in self._ends[drop:]))
        del self._tracks[:drop]
        if self._logprobs is not None:
            base = self._logprob_ends[drop - 1]
            del self._logprobs[:base]
            self._logprob_ends = array("I", (end - base for end in self._logprob_ends[drop:]))
        if self._counts is not None:
            del self._counts[:drop]
        self.first_id += drop
        self._control_events = {i: e for i, e in self._control_events.items() if i >= self.first_id}

    def after(self, cursor: int, *, joined: bool = True) -> tuple[int, ControlEvent | Sequence[TextRun]]:
        """The next step after event `cursor`: `(id of its last event, content)`.

        A control event is a step of its own. Consecutive text events are one step if `joined`, with one run
        per track; within a choice the runs have the order reasoning, text, tool. The caller makes sure that
        `first_id - 1 <= cursor < last_id`.
        """
        start = cursor - self.first_id + 1
        tracks = self._tracks
        track = tracks[start]
        if track == _CONTROL:
            return cursor + 1, self._control_events[cursor + 1]
        if not joined or start + 1 == len(tracks):
            return cursor + 1, (self._text_run(track, start, start + 1),)
        return self._coalesced(start)

    def is_one_step(self, cursor: int) -> bool:
        """True if no track repeats after event `cursor`: a token of each choice, or the parts of one."""
        if self.last_id - cursor > len(self._names) + 1:
            return False
        tracks = self._tracks[cursor - self.first_id + 1 :]
        return len(set(tracks)) == len(tracks)

    def _coalesced(self, start: int) -> tuple[int, Sequence[TextRun]]:
        merged: dict[int, list[TextRun]] = {}
        rank: dict[int, int] = {}
        stop, size = start, 0
        for track, run_start, run_stop in self._runs(start):
            if track == _CONTROL or size > _MAX_FRAME_BYTES:
                break
            name = self._names[track - 1]
            if _RANK[name.channel] < rank.get(name.choice, 0):
                break
            rank[name.choice] = _RANK[name.channel]
            text_run = self._text_run(track, run_start, run_stop)
            merged.setdefault(track, []).append(text_run)
            size += len(text_run.text)
            stop = run_stop
        counts = self._counts[stop - 1] if self._counts is not None else None
        joined = [_join(parts)._replace(counts=counts) for parts in merged.values()]
        return self.first_id + stop - 1, joined

    def _runs(self, start: int) -> Iterator[tuple[int, int, int]]:
        """Runs of one track from index `start`: track, first index, end. At most a frame's bytes each."""
        tracks, ends = self._tracks, self._ends
        index, count = start, len(tracks)
        while index < count:
            track, first = tracks[index], index
            limit = ends[index] + _MAX_FRAME_BYTES
            index += 1
            while index < count and tracks[index] == track != _CONTROL and ends[index] <= limit:
                index += 1
            yield track, first, index

    def _text_run(self, track: int, start: int, stop: int) -> TextRun:
        ends = self._ends
        text = bytes(self._text[ends[start - 1] if start else 0 : ends[stop - 1]])
        logprobs = None
        if self._logprobs is not None:
            lp = self._logprob_ends
            logprobs = bytes(self._logprobs[lp[start - 1] if start else 0 : lp[stop - 1]][1:])
        counts = self._counts[stop - 1] if self._counts is not None else None
        return TextRun(self._names[track - 1], text, logprobs, counts)

    def contents(self) -> tuple[Mapping[TextTrack, TextRun], Sequence[ControlEvent]]:
        """The text and control events that are still in the ring, in the order in which they began.

        Events that were dropped are missing.
        """
        merged: dict[int, list[TextRun]] = {}
        for track, start, stop in self._runs(0):
            if track != _CONTROL:
                merged.setdefault(track, []).append(self._text_run(track, start, stop))
        parts = {self._names[track - 1]: _join(runs) for track, runs in merged.items()}
        return parts, [self._control_events[i] for i in sorted(self._control_events)]

    def dump(self, after: int, *, done: bool = False) -> tuple[int, bytes] | None:
        """The events after event `after` as one segment, and the first one's id; None without events.

        With `done`, the segment ends in the `Done` that is still to be appended.
        """
        start = max(0, after + 1 - self.first_id)
        if start >= len(self._tracks) and not done:
            return None
        first_id = self.first_id + start
        tracks = self._tracks[start:]
        lengths, text = _cut(self._ends, self._text, start)
        logprobs = logprob_lengths = counts = None
        if self._logprobs is not None:
            logprob_lengths, logprobs = _cut(self._logprob_ends, self._logprobs, start)
        if self._counts is not None:
            counts = list(chain.from_iterable(self._counts[start:]))
        control_events = [
            (i - first_id, _KIND_OF[type(e)], e) for i, e in self._control_events.items() if i >= first_id
        ]
        if done:
            control_events.append((len(tracks), _KIND_OF[Done], Done()))
            tracks.append(_CONTROL)
            lengths.append(0)
            if logprob_lengths is not None:
                logprob_lengths.append(0)
            if counts is not None:
                counts += Counts()
        packed = pack(
            Segment(
                first_id,
                self._names,
                control_events,
                tracks,
                lengths,
                text,
                logprobs,
                logprob_lengths,
                counts,
            )
        )
        return first_id, packed

    @classmethod
    def restore(cls, dumped: Iterable[bytes], limit_bytes: int, *, only_prefix: bool = False) -> Ring:
        """A ring of the events of `dumped` segments, oldest first, with their ids.

        An event in two segments is restored once. If ids are missing between two segments, the ring begins
        after the gap, or with `only_prefix` ends before it. Events beyond the limit are dropped. Raises
        ValueError for damaged segments.
        """
        ring: Ring | None = None
        for raw in dumped:
            segment = unpack(raw)
            if only_prefix and segment.first_id > (ring.last_id if ring else 0) + 1:
                break
            if ring is None or segment.first_id > ring.last_id + 1:
                ring = cls(
                    limit_bytes,
                    logprobs=segment.logprobs is not None,
                    counts=segment.counts is not None,
                    first_id=segment.first_id,
                )
            ring._extend(segment)
        return ring or cls(limit_bytes)

    def _extend(self, segment: Segment) -> None:
        """Append a segment without the events that are here already. Raises ValueError."""
        if (self._logprobs is None, self._counts is None) != (
            segment.logprobs is None,
            segment.counts is None,
        ):
            raise ValueError("segments of different streams")
        skip = self.last_id + 1 - segment.first_id
        track_of = [_CONTROL, *(self._track_of.get(key) or self._new_track(key) for key in segment.names)]
        for index, kind, fields in segment.control_events:
            if index >= skip:
                self._control_events[segment.first_id + index] = _control_event(kind, fields)
        self._tracks.extend(track_of[track] for track in segment.tracks[skip:])
        _append(self._ends, self._text, segment.lengths, segment.text, skip)
        if self._logprobs is not None and segment.logprobs is not None:
            _append(self._logprob_ends, self._logprobs, segment.logprob_lengths or (), segment.logprobs, skip)
        if self._counts is not None:
            numbers = iter((segment.counts or ())[4 * skip :])
            self._counts.extend(map(Counts, numbers, numbers, numbers, numbers))
        while self.nbytes > self._limit_bytes and len(self._tracks) > 1:
            self._trim()


def _cut(ends: array[int], data: bytearray, start: int) -> tuple[list[int], bytes]:
    """The lengths and the bytes of the events from index `start` on."""
    base = ends[start - 1] if start else 0
    mine = ends[start:]
    return list(map(sub, mine, chain((base,), mine))), bytes(data[base:])


def _append(ends: array[int], data: bytearray, lengths: Sequence[int], more: bytes, skip: int) -> None:
    """Append events of these lengths, without the first `skip`, to a column's end offsets and data."""
    ends.extend(islice(accumulate(lengths[skip:], initial=len(data)), 1, None))
    data += more[sum(lengths[:skip]) :]


def _control_event(kind: str, fields: Mapping[str, Any]) -> ControlEvent:
    if kind == "tool_started":
        return ToolStarted(fields["choice"], ToolCall(**fields["tool"]))
    return _KINDS[kind](**fields)


def _join(parts: Sequence[TextRun]) -> TextRun:
    if len(parts) == 1:
        return parts[0]
    logprobs = None
    if parts[0].logprobs is not None:
        logprobs = b",".join(p.logprobs for p in parts if p.logprobs)
    return TextRun(parts[0].track, b"".join(p.text for p in parts), logprobs, parts[-1].counts)
