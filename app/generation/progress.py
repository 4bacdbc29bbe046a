"""How far an answer had come when it was suspended, and the stage that releases nothing a second time.

An engine that goes on with an answer hands over all of it again (`Prompt.continued`), and the stream screen
reads all of it again. What has been released before is dropped behind the screen. It must be the same to
the character: what was released is never rewritten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import orjson

from app.core import Counts, Delta, ToolCall
from app.errors import InternalError
from app.generation.request_safety import AnswerScreen
from app.messages import without_surrogates
from app.safety.verdict import Verdict
from app.stream.ring import ControlEvent, Finished, TextRun, TextTrack, ToolStarted


class Diverged(InternalError):
    """The engine says something else than what was released of the answer before."""

    default_code = "interrupted"


@dataclass(frozen=True, slots=True)
class Progress:
    """How far each choice of an answer has come. Empty for a new answer."""

    token_ids: Sequence[Sequence[int]] = ()
    """Token ids that were generated, one run for each choice."""
    counts: Mapping[int, Counts] = field(default_factory=dict)
    """The counts of what was generated, as billed."""
    released: Mapping[int, Counts] = field(default_factory=dict)
    """The counts of what was released."""

    def as_before(self, delta: Delta) -> Delta:
        """The delta with the prompt's counts as they were: computing it again costs its caller nothing."""
        earlier = self.counts.get(delta.choice)
        if earlier is None:
            return delta
        counts = delta.counts._replace(
            prompt_tokens=earlier.prompt_tokens, cached_tokens=earlier.cached_tokens
        )
        return delta._replace(counts=counts)

    def is_news(self, delta: Delta) -> bool:
        """Whether a delta's counts are at least those that its choice has had."""
        earlier = self.counts.get(delta.choice)
        return earlier is None or delta.counts.completion_tokens >= earlier.completion_tokens


class ReleasedBefore:
    """The screen of an answer that goes on: drops what the stream has of it already."""

    def __init__(
        self,
        screen: AnswerScreen,
        held: tuple[Mapping[TextTrack, TextRun], Sequence[ControlEvent]],
        released: Mapping[int, Counts],
    ) -> None:
        """`held` is all that was released before, text by track and control events."""
        self._screen = screen
        self._released = released
        runs, events = held
        self._tracks = {track: _Track(run) for track, run in runs.items()}
        self._tools: dict[int, list[ToolCall]] = {}
        self._finished = {event.choice for event in events if isinstance(event, Finished)}
        for event in events:
            if isinstance(event, ToolStarted):
                self._tools.setdefault(event.choice, []).append(event.tool)
        self._behind = {*released, *self._finished, *(track.choice for track in runs), *self._tools}
        """Choices of which not all that was released has come again."""

    @property
    def halted(self) -> Verdict | None:
        """See AnswerScreen."""
        return self._screen.halted

    @property
    def in_review(self) -> bool:
        """See AnswerScreen."""
        return self._screen.in_review

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """See AnswerScreen. Raises Diverged too."""
        released = self._screen.feed(delta)
        return list(self._news(released)) if self._behind else released

    async def review(self) -> Sequence[Delta]:
        """See AnswerScreen. Raises Diverged too."""
        return list(self._news(await self._screen.review()))

    def drain(self) -> Sequence[Delta]:
        """See AnswerScreen. Of an answer that says something else, nothing."""
        released = self._screen.drain()
        try:
            return list(self._news(released))
        except Diverged:  # it has broken off for another reason already
            return ()

    def _news(self, deltas: Sequence[Delta]) -> Iterator[Delta]:
        for delta in deltas:
            if delta.choice not in self._behind:
                yield delta
            elif delta.choice not in self._finished and (rest := self._rest(delta)) is not None:
                yield rest

    def _rest(self, delta: Delta) -> Delta | None:
        """What is new in a delta; None where nothing is."""
        choice, tool, text, logprobs = delta.choice, delta.tool, delta.text, delta.logprobs
        started = self._tools.get(choice)
        if started and tool is not None and tool.name is not None:
            if (tool.index, tool.name) != (started[0].index, started[0].name):
                raise _diverged()
            del started[0]
            tool = replace(tool, id=None, name=None)
        track = self._tracks.get(TextTrack(choice, delta.channel, 0 if tool is None else tool.index))
        if track is not None:
            text, logprobs = track.rest(text, logprobs)
        if self._complete(choice):
            self._behind.discard(choice)
        elif text or delta.finish_reason is not None:
            raise _diverged()
        is_new = text or logprobs or delta.finish_reason is not None or (tool is not None and tool.name)
        released_tokens = self._released.get(choice, Counts()).completion_tokens
        if not is_new and delta.counts.completion_tokens <= released_tokens:
            return None
        return delta._replace(text=text, logprobs=logprobs, tool=tool)

    def _complete(self, choice: int) -> bool:
        tracks = (track for name, track in self._tracks.items() if name.choice == choice)
        return not self._tools.get(choice) and all(track.complete for track in tracks)


class _Track:
    """The text of one track that was released, and how much of it has come again."""

    def __init__(self, run: TextRun) -> None:
        self._text: str = orjson.loads(b'"' + run.text + b'"')
        self._at = 0
        self._entries = len(orjson.loads(b"[" + run.logprobs + b"]")) if run.logprobs else 0
        """Entries of log probabilities that are still to come again."""

    @property
    def complete(self) -> bool:
        """Whether all of it has come again."""
        return self._at == len(self._text)

    def rest(
        self, text: str, logprobs: Sequence[Mapping[str, object]] | None
    ) -> tuple[str, Sequence[Mapping[str, object]] | None]:
        """What of a delta's text and log probabilities is new. Raises Diverged."""
        if logprobs and self._entries:
            num_released = min(self._entries, len(logprobs))
            self._entries -= num_released
            logprobs = logprobs[num_released:] or None
        if not self.complete:
            again = text[: len(self._text) - self._at]
            if not self._text.startswith(without_surrogates(again), self._at):  # as the ring writes it
                raise _diverged()
            self._at += len(again)
            text = text[len(again) :]
        return text, logprobs


def _diverged() -> Diverged:
    return Diverged(
        "The server was restarted, and its model goes on with another text than the one that was sent; the"
        " answer ends here. Send the request again for another."
    )
