"""The stage of a continued answer that releases nothing a second time.

An engine that continues an answer hands over all of it again (`Prompt.continued`), and the stream screen
reads all of it again. The part that was released before is dropped behind the screen. It must be the same
to the character: released text is never rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import orjson

from app.core import Counts, Delta, ToolCall
from app.errors import InternalError
from app.messages import without_surrogates
from app.safety.session.session import AnswerScreen
from app.safety.verdict import Verdict
from app.stream.ring import ControlEvent, Finished, TextRun, TextTrack, ToolStarted


class OutputMismatch(InternalError):
    """The engine generates another answer than the one that was released in part."""

    default_code = "interrupted"

    def __init__(self) -> None:
        super().__init__(
            "The server was restarted, and the regenerated output diverged from what was sent; the answer"
            " ends here. Send the request again for another."
        )


class SkipReleased:
    """The screen of a continued answer: drops the part that its stream has already."""

    def __init__(
        self,
        screen: AnswerScreen,
        in_ring: tuple[Mapping[TextTrack, TextRun], Sequence[ControlEvent]],
        released: Mapping[int, Counts],
    ) -> None:
        """`in_ring` is all that was released, text by track and control events; `released` are its counts."""
        self._screen = screen
        self._released = released
        runs, events = in_ring
        self._tracks = {track: _Track(run) for track, run in runs.items()}
        self._tools: dict[int, list[ToolCall]] = {}
        self._finished = {event.choice for event in events if isinstance(event, Finished)}
        for event in events:
            if isinstance(event, ToolStarted):
                self._tools.setdefault(event.choice, []).append(event.tool)
        self._behind = {*released, *self._finished, *(track.choice for track in runs), *self._tools}
        """Choices whose released part has not been generated again in full."""
        self._left_chars = dict.fromkeys(self._behind, 0)
        """Characters of each choice's released part that the screen has not been given."""
        for name, track in self._tracks.items():
            self._left_chars[name.choice] += track.num_chars

    @property
    def halted(self) -> Verdict | None:
        return self._screen.halted

    @property
    def in_review(self) -> bool:
        return self._screen.in_review

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """Screen a delta, as `AnswerScreen.feed`. Raises OutputMismatch too."""
        if self._behind and delta.choice in self._left_chars:
            self._left_chars[delta.choice] -= len(delta.text)
        passed = self._screen.feed(delta)
        return list(self._unreleased(passed)) if self._behind else passed

    async def review(self) -> Sequence[Delta]:
        """Review the held text, as `AnswerScreen.review`. Raises OutputMismatch too."""
        return list(self._unreleased(await self._screen.review()))

    def take_releasable(self) -> Sequence[Delta]:
        """The rest, as `AnswerScreen.take_releasable`; nothing of an answer that differs."""
        passed = self._screen.take_releasable()
        try:
            return list(self._unreleased(passed))
        except OutputMismatch:  # it has broken off for another reason already
            return ()

    def _unreleased(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            if delta.choice not in self._behind:
                yield delta
            elif delta.choice not in self._finished and (rest := self._rest(delta)) is not None:
                yield rest

    def _rest(self, delta: Delta) -> Delta | None:
        """The part of a delta that was not released; None where there is none. Raises OutputMismatch."""
        choice, tool, text, logprobs = delta.choice, delta.tool, delta.text, delta.logprobs
        started = self._tools.get(choice)
        if started and tool is not None and tool.name is not None:
            if (tool.index, tool.name) != (started[0].index, started[0].name):
                raise OutputMismatch
            del started[0]
            tool = replace(tool, id=None, name=None)
        track = self._tracks.get(TextTrack(choice, delta.channel, 0 if tool is None else tool.index))
        if track is not None:
            text, logprobs = track.skip(text, logprobs)
        if not started and all(t.is_complete for name, t in self._tracks.items() if name.choice == choice):
            self._behind.discard(choice)
        elif text or delta.finish_reason is not None:
            if text or self._left_chars[choice] > 0:
                raise OutputMismatch
            # The screen has read the whole released part. It withholds the rest of this delta.
            self._behind.discard(choice)
            return delta._replace(counts=self._released.get(choice, delta.counts))
        is_new = text or logprobs or delta.finish_reason is not None or (tool is not None and tool.name)
        released_tokens = self._released.get(choice, Counts()).completion_tokens
        if not is_new and delta.counts.completion_tokens <= released_tokens:
            return None
        return delta._replace(text=text, logprobs=logprobs, tool=tool)


class _Track:
    """The released text of one track, and the length of it that was generated again."""

    def __init__(self, run: TextRun) -> None:
        self._text: str = orjson.loads(b'"' + run.text + b'"')
        self._length = 0
        self._entries = len(orjson.loads(b"[" + run.logprobs + b"]")) if run.logprobs else 0
        """Entries of log probabilities that are still to be generated again."""

    @property
    def num_chars(self) -> int:
        return len(self._text)

    @property
    def is_complete(self) -> bool:
        """True if all of it was generated again."""
        return self._length == len(self._text)

    def skip(
        self, text: str, logprobs: Sequence[Mapping[str, object]] | None
    ) -> tuple[str, Sequence[Mapping[str, object]] | None]:
        """The unreleased part of a delta's text and log probabilities. Raises OutputMismatch."""
        if logprobs and self._entries:
            num_released = min(self._entries, len(logprobs))
            self._entries -= num_released
            logprobs = logprobs[num_released:] or None
        again = text[: len(self._text) - self._length]
        if not self._text.startswith(without_surrogates(again), self._length):  # as the ring writes it
            raise OutputMismatch
        self._length += len(again)
        return text[len(again) :], logprobs
