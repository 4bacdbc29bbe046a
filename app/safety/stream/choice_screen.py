"""One choice of an answer: what of it is read, held, reviewed, released and withheld.

How many tokens are held back is `ChoiceDoubt.holdback_tokens` (app.safety.stream.answer_review), by the
thresholds of app.safety.thresholds. If the model ends the answer, all that was read and did not halt is
released. If the caller may have chosen the end (length, stop strings and ids, grammar, cancel), a possible
beginning of a hard-listed span stays withheld. Otherwise two requests cut at different places would give the
whole span. If the screen is busy, nothing passes, even with `fail_open`: app.safety.stream.stream_screen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from app.core import Channel, Counts, Delta
from app.safety.policies.policy import Policy
from app.safety.stream.answer_context import AnswerContext
from app.safety.stream.answer_review import AnswerClassifier, ChoiceDoubt
from app.safety.stream.span_reader import PAST_END, MatchState, Position, SpanReader
from app.safety.text.escapes import unescape
from app.safety.text.hard_list import HardList
from app.safety.thresholds import MIN_SPAN_CHARS, READ_AT_ONCE_TOKENS
from app.safety.verdict import Scores, Verdict

_ALL_TOKENS = 1 << 62


class StreamState(Enum):
    """The state of an answer after a delta.

    clear    it is released at once
    held     the newest tokens wait for those that follow
    review   all that is held waits for the second-stage classifier
    halted   the held text is dropped, and the answer ends
    """

    CLEAR = "clear"
    HELD = "held"
    REVIEW = "review"
    HALTED = "halted"


CLEAR, HELD, REVIEW, HALTED = StreamState


@dataclass(frozen=True, slots=True)
class ScreenSetup:
    """How all choices of a request are screened."""

    classifier: AnswerClassifier
    policy: Policy
    hard_list: HardList | None
    match: MatchState
    """The state of the hard list after the text that stands in front of the answer."""
    continued: str
    """The text that the answer continues, which the classifier reads first."""
    context: AnswerContext
    prompt_harm: float
    """The harm of the prompt."""
    watched: bool
    scores_wanted: bool
    """True if an answer is reviewed at its end in any case."""
    on_held: Callable[[float, int], None]
    clock_s: Callable[[], float]


class HeldDeltas:
    """The deltas of a choice that wait, in their order, and the counts of what was released."""

    __slots__ = ("_num_passed", "_setup", "_timed_s", "_timed_tokens", "queue", "released")

    def __init__(self, setup: ScreenSetup) -> None:
        self._setup = setup
        self.queue: deque[tuple[Delta, int, Position]] = deque()
        """Each delta, its number of tokens, and how far the hard list had read then."""
        self.released = Counts()
        self._num_passed = 0
        """Deltas that were released without being held, and not counted yet."""
        self._timed_tokens = -1
        """The token whose time is taken, a single one at a time; -1 for none."""
        self._timed_s = 0.0

    @property
    def tokens(self) -> int:
        """The number of tokens that wait."""
        return self.queue[-1][1] - self.released.completion_tokens if self.queue else 0

    def pass_through(self, counts: Counts) -> None:
        """Note that a delta with these counts is released without being held."""
        self.released = counts
        self._num_passed += 1

    def count_passed(self) -> None:
        """Count the deltas that were not held. One call for each delta would double its cost."""
        self._setup.on_held(0.0, self._num_passed)
        self._num_passed = 0

    def append(self, delta: Delta, position: Position) -> None:
        """Hold a delta."""
        if self._num_passed:
            self.count_passed()
        tokens = delta.counts.completion_tokens
        self.queue.append((delta, tokens, position))
        if self._timed_tokens < 0:
            self._timed_tokens, self._timed_s = tokens, self._setup.clock_s()

    def release(self, up_to_tokens: int, safe_until: Position) -> list[Delta]:
        """Take out what is old enough, and in which no span has begun."""
        queue, (written, shown, logprob), out = self.queue, safe_until, []
        while queue:
            delta, tokens, position = queue[0]
            if tokens > up_to_tokens or position[0] > written or position[1] > shown or position[2] > logprob:
                break
            out.append(delta)
            queue.popleft()
        if out:
            self.released = out[-1].counts
            if 0 <= self._timed_tokens <= self.released.completion_tokens:
                self._setup.on_held(self._setup.clock_s() - self._timed_s, 1)
                self._timed_tokens = -1
        return out

    def drop(self) -> list[Delta]:
        """Take out all of it, which is not released."""
        self.count_passed()
        dropped = [delta for delta, _, _ in self.queue]
        self.queue.clear()
        return dropped


class ChoiceScreen:
    """One choice: it reads each delta for the classifier and the hard list, and holds what must wait."""

    def __init__(self, setup: ScreenSetup) -> None:
        self._setup = setup
        self._channel: tuple[str, int] | None = None
        self._text_channel: Channel | None = None
        """The channel of deltas that need no look at `_channel`; None for tool calls."""
        self._spans = None if setup.hard_list is None else SpanReader(setup.hard_list, setup.match)
        self._unread = setup.continued
        """Text that the classifier has not read."""
        self._escape = ""
        """An escape at the end of the text, of which the rest is still to arrive."""
        self._tokens = 0
        self.doubt = ChoiceDoubt(setup.classifier, setup.policy, setup.prompt_harm, watched=setup.watched)
        self._holdback_tokens = self.doubt.holdback_tokens
        """The hold-back; it follows that of the doubt, downwards by one for each token."""
        self.held = HeldDeltas(setup)
        self.state = CLEAR
        self.verdict: Verdict | None = None
        """The verdict that halted the choice."""

    def read(self, delta: Delta) -> StreamState:
        """Read a delta, and hold it unless it is CLEAR."""
        spans, doubt, held = self._spans, self.doubt, self.held
        _, channel, text, _, counts, finish_reason, _, tool, _ = delta
        tokens, is_last = counts.completion_tokens, finish_reason is not None
        if tool is not None or channel != self._text_channel:
            self._enter_channel(delta)
        if spans is not None and self._completes_span(spans, delta):
            doubt.hit_span(tokens, clean_until=self._tokens)
            self.verdict = self._setup.policy.halted()
            return self._hold(delta, HALTED)
        if self._escape or "\\" in text or "&" in text:
            text, self._escape = unescape(self._escape + text)
        if tool is not None and tool.name:
            text = f"{tool.name}\n{text}"
        text = self._unread + text
        holdback = self._holdback_tokens
        may_wait = holdback >= 2 * READ_AT_ONCE_TOKENS and not doubt.in_doubt and not is_last
        if may_wait and tokens - doubt.read_tokens < READ_AT_ONCE_TOKENS:
            self._unread = text
        else:
            self._unread = ""
            is_due = doubt.read(text + self._escape if is_last else text, tokens)
            if is_due or (is_last and doubt.is_due_at_end(scores_wanted=self._setup.scores_wanted)):
                return self._hold(delta, REVIEW)
        if holdback or doubt.holdback_tokens:
            holdback -= tokens - self._tokens
            self._holdback_tokens = max(doubt.holdback_tokens, holdback)
        self._tokens = tokens
        if is_last or self._holdback_tokens or held.queue or (spans is not None and spans.has_begun):
            held.append(delta, PAST_END if spans is None else spans.position)
            self.state = HELD
            return HELD
        held.pass_through(counts)  # most tokens: nothing is held
        self.state = CLEAR
        return CLEAR

    def _hold(self, delta: Delta, state: StreamState) -> StreamState:
        self.held.append(delta, PAST_END if self._spans is None else self._spans.position)
        self.state = state
        return state

    def _enter_channel(self, delta: Delta) -> None:
        channel = (delta.channel, 0 if delta.tool is None else delta.tool.index)
        if channel == self._channel or not (delta.text or delta.tool is not None):
            return  # a last delta may be of any
        if self._unread and self._channel is not None:
            self._unread += "\n"  # a word ends with its channel
        self._channel = channel
        self._text_channel = None if channel[1] else delta.channel
        self.doubt.excerpt.switch_channel(delta.channel, len(self._unread))

    def _completes_span(self, spans: SpanReader, delta: Delta) -> bool:
        """Read a delta for the hard list; returns True if a span is complete."""
        tool = delta.tool
        if tool is not None and (
            (tool.name and spans.finds_name(tool.name)) or (tool.id and spans.finds_in(tool.id))
        ):
            return True
        if delta.logprobs and spans.finds_in_logprobs(delta.logprobs):
            return True
        if not delta.text:
            return False
        assert self._channel is not None
        if spans.channel != self._channel:
            spans.switch_channel(self._channel)
        return spans.finds(delta.text)

    def take_scores(self, scores: Scores) -> StreamState:
        """Take the scores of the second stage: HALTED, or HELD until `release`."""
        verdict = self.doubt.take_scores(scores)
        if verdict.blocked:
            self.verdict, self.state = verdict, HALTED
        else:
            self._tokens, self._holdback_tokens = self.doubt.read_tokens, self.doubt.holdback_tokens
            self.state = HELD
        return self.state

    def release(self) -> Sequence[Delta]:
        """Take the held deltas that may be released: all of them once the choice has ended."""
        held, spans = self.held, self._spans
        last = held.queue[-1][0]
        if last.finish_reason is not None:
            return self._end(last)
        safe_until = PAST_END if spans is None else spans.safe_until()
        return held.release(self._tokens - self._holdback_tokens, safe_until)

    def _safe_until(self, shortest: int = 1) -> Position:
        """The position up to which no span of `shortest` characters or more has begun."""
        return PAST_END if self._spans is None else self._spans.safe_until(shortest)

    def _end(self, last: Delta) -> Sequence[Delta]:
        """Release the held deltas, less a possible beginning of a span where a caller chose the end."""
        if not self._is_chosen_by_caller(last):
            return self.held.release(_ALL_TOKENS, PAST_END)
        stop, spans = last.matched_stop, self._spans
        if spans is not None and (spans.has_begun or (isinstance(stop, str) and spans.finds_in(stop))):
            stop = None
        shortest = 1 if last.finish_reason == "abort" else MIN_SPAN_CHARS
        out = self.held.release(_ALL_TOKENS, self._safe_until(shortest))
        if not self.held.drop():
            return [*out[:-1], out[-1]._replace(matched_stop=stop)]
        counts = self.held.released
        if not counts.prompt_tokens:
            counts = last.counts._replace(completion_tokens=0, reasoning_tokens=0)
        silent = last._replace(text="", token_ids=(), logprobs=None, tool=None, counts=counts)
        return [*out, silent._replace(matched_stop=None)]

    def _is_chosen_by_caller(self, last: Delta) -> bool:
        """True if the request, and not the model, may have set where the answer ends."""
        if last.finish_reason not in ("stop", "tool_calls"):
            return True
        context, stop = self._setup.context, last.matched_stop
        return context.has_forced_end or isinstance(stop, str) or stop in context.stop_ids

    def break_off(self) -> Sequence[Delta]:
        """Take out what may be released of a choice that ends here without a last delta."""
        doubt = self.doubt
        is_due = doubt.read(self._unread, self._tokens)
        doubt.break_off(in_review=is_due or self.state is REVIEW)
        out = self.held.release(doubt.clean_until if doubt.in_doubt else _ALL_TOKENS, self._safe_until())
        self.held.drop()
        return out

    @property
    def leaked_tokens(self) -> int:
        """The number of tokens that were released after the last one without doubt."""
        return max(0, self.held.released.completion_tokens - self.doubt.clean_until)
