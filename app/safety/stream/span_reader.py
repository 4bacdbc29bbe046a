"""The hard list over one choice: how far a span may have begun in its text so far.

    each channel     as it is, and as shown: escapes undone, Markdown's marks taken away
    across channels  the beginning in the last channel, as long as the next one continues it
    logprobs         their tokens, and for each the likely others

Positions are counted in folded characters over all channels. A character costs the same whatever stands
before it. Knows nothing of tokens or of held text.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from app.safety.text.escapes import TRIGGERS, unescape
from app.safety.text.hard_list import FOUND, MARKS, HardList

ChannelKey = tuple[str, int]
_as_it_is = frozenset(TRIGGERS + MARKS).isdisjoint
"""True for a text that is shown as it is."""
_CHANNELS = 16
"""Channels whose beginnings are remembered; of tool calls, which arrive in order, only the last continue."""


class Position(NamedTuple):
    """Folded characters so far: as it is, as a client shows it, and in logprobs."""

    as_written: int
    shown: int
    logprob_chars: int


class MatchState(NamedTuple):
    """States of the list after a text as it is and as it is shown, and an escape at its end."""

    state: int = 0
    shown: int = 0
    after_space: bool = False
    pending: str = ""


UNMATCHED = MatchState()
PAST_END = Position(1 << 62, 1 << 62, 1 << 62)
"""Past every text."""


class _Track:
    """One reading of a text: its state in the list."""

    __slots__ = ("after_space", "state")

    def __init__(self, state: int = 0, *, after_space: bool = False) -> None:
        self.state = state
        self.after_space = after_space

    def walk(self, hard_list: HardList, text: str) -> int:
        """Read a text; returns its number of folded characters."""
        folded = hard_list.fold(text, after_space=self.after_space)
        if folded:
            self.state = hard_list.walk(self.state, folded)
            self.after_space = folded[-1] == " "
        return len(folded)

    def copy(self) -> _Track:
        """Another reading that continues from here."""
        return _Track(self.state, after_space=self.after_space)


class _Reading(_Track):
    """One channel: as it is, and as shown where that differs."""

    __slots__ = ("pending", "shown")

    def __init__(self, match: MatchState = UNMATCHED) -> None:
        super().__init__(match.state, after_space=match.after_space)
        self.shown: _Track | None = None
        self.pending = match.pending
        if match.shown != match.state or match.pending:
            self.shown = _Track(match.shown, after_space=match.after_space)

    def split_shown(self) -> None:
        """Read from here on apart what a client shows, unless that is done already."""
        if self.shown is None:
            self.shown = self.copy()

    def walk_shown(self, hard_list: HardList, text: str) -> tuple[int, int]:
        """Read on as a client shows it, until that is again what the text itself says.

        Returns the number of folded characters and the state that they lead to.
        """
        assert self.shown is not None
        text_read, self.pending = unescape(self.pending + text)
        length = self.shown.walk(hard_list, text_read.translate(hard_list.marks))
        state = self.shown.state
        if not self.pending and state == self.state and self.shown.after_space == self.after_space:
            self.shown = None
        return length, state

    @property
    def is_idle(self) -> bool:
        """True if a new reading would continue in the same way."""
        return not (self.state or self.shown or self.pending)


class SpanReader:
    """One choice's text, logprobs and names of tools, read for the spans of a list."""

    def __init__(self, hard_list: HardList, match: MatchState = UNMATCHED) -> None:
        """`match` is the state after the text that a client reads before the answer."""
        self._list = hard_list
        self.channel: ChannelKey | None = None
        self._reading = _Reading(match)
        self._readings: dict[ChannelKey, _Reading] = {}
        self._across: _Track | None = None
        self._spelling = _Reading()
        self._as_written = self._shown = self._logprob_chars = 0

    def switch_channel(self, channel: ChannelKey) -> None:
        """Continue in another channel, where a span of the last one may continue too."""
        if channel == self.channel:
            return
        old = self._reading
        if self.channel is None:  # the first one continues what stands in front of the answer
            self.channel = channel
            return
        self._readings.pop(self.channel, None)
        if not old.is_idle:
            self._readings[self.channel] = old
            if len(self._readings) > _CHANNELS:
                self._readings.pop(next(iter(self._readings)))
        if self._across is None and old.state:
            self._across = old.copy()
        self.channel, self._reading = channel, self._readings.get(channel) or _Reading()

    def finds(self, text: str) -> bool:
        """Read a text of this channel; returns True if a span is complete."""
        hard_list, reading, across = self._list, self._reading, self._across
        if not _as_it_is(text):
            reading.split_shown()
        length = reading.walk(hard_list, text)
        self._as_written += length
        if reading.shown is None and across is None:  # most tokens
            self._shown += length
            return reading.state == FOUND
        shown_length, shown_state = length, reading.state
        if reading.shown is not None:
            shown_length, shown_state = reading.walk_shown(hard_list, text)
        self._shown += shown_length
        if across is not None:
            across.walk(hard_list, text)
            if across.state == FOUND:
                return True
            if not across.state or across.state == reading.state:
                self._across = None
        return FOUND in (reading.state, shown_state)

    def finds_name(self, name: str) -> bool:
        """Read the name of a tool; returns True if a span is complete in it, or across several names."""
        if self.finds_in(name):
            return True
        self.switch_channel(("name", 0))
        return self.finds(name)

    def finds_in(self, text: str) -> bool:
        """True if a text, read on its own, has a span in it."""
        return self._list.found_in(text)

    def finds_in_logprobs(self, entries: Sequence[Mapping[str, Any]]) -> bool:
        """Read logprobs; returns True if a span is complete, or would be with another likely token.

        Logprobs may be ahead of the text, which a parser holds, and say what is not in it at all.
        """
        hard_list, spelling = self._list, self._spelling
        for entry in entries:
            state, after_space = spelling.state, spelling.after_space
            token = entry["token"]
            if not _as_it_is(token):
                spelling.split_shown()
            self._logprob_chars += spelling.walk(hard_list, token)
            shown_state = spelling.state
            if spelling.shown is not None:
                _, shown_state = spelling.walk_shown(hard_list, token)
            if FOUND in (spelling.state, shown_state):
                return True
            for other in entry.get("top_logprobs") or ():
                track = _Track(state, after_space=after_space)
                track.walk(hard_list, other["token"])
                if track.state == FOUND:
                    return True
        return False

    @property
    def has_begun(self) -> bool:
        """True if the end of the text, or of the logprobs, may yet become a span."""
        reading = self._reading
        return bool(
            reading.state or reading.shown or self._across or self._spelling.state or self._spelling.shown
        )

    @property
    def position(self) -> Position:
        """The position of the reading; one character further within an escape."""
        return Position(self._as_written, self._shown + bool(self._reading.pending), self._logprob_chars)

    def safe_until(self, shortest: int = 1) -> Position:
        """The position up to which no span of `shortest` characters or more has begun."""
        depth, reading, spelling = self._list.depth, self._reading, self._spelling
        as_written = depth[reading.state]
        if self._across is not None:
            as_written = max(as_written, depth[self._across.state])
        shown = as_written if reading.shown is None else depth[reading.shown.state]
        logprob_chars = depth[spelling.state]
        if spelling.shown is not None:
            logprob_chars = max(logprob_chars, depth[spelling.shown.state])
        return Position(
            self._as_written - (as_written if as_written >= shortest else 0),
            self._shown - shown if shown >= shortest else self._shown + (shortest > 1),
            self._logprob_chars - (logprob_chars if logprob_chars >= shortest else 0),
        )


def match_state(hard_list: HardList | None, text: str) -> MatchState:
    """The state after a text, which may have whole spans in it."""
    if hard_list is None or not text:
        return UNMATCHED
    shown, pending = unescape(text)
    return MatchState(
        _state_after(hard_list, text),
        _state_after(hard_list, shown.translate(hard_list.marks)),
        hard_list.fold(text, after_space=False).endswith(" "),
        pending,
    )


def _state_after(hard_list: HardList, text: str) -> int:
    tail = hard_list.fold(text, after_space=False)[-max(hard_list.depth) :]
    for first in range(len(tail)):
        state = hard_list.walk(0, tail[first:])
        if state != FOUND:
            return state
    return 0
