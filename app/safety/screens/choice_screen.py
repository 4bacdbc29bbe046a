"""One choice of an answer on its way out: what of it is read, held, released, withheld.

An end that the model chose releases what was read and did not halt. An end that the caller could choose
(length, stop strings and ids, grammar, cancel) releases it only up to where the model was in no doubt and no
hard-listed span may have begun: asking again with another cut reads no further.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from app.core import Counts, Delta, FinishReason
from app.safety.screens.heard_text import HeardText
from app.safety.screens.span_reader import Position, SpanReader
from app.safety.screens.stream_terms import Suspicion, Terms
from app.safety.text.escapes import unescape
from app.safety.verdict import Scores, Verdict
from app.safety.verdict import harm as harm_of

MIN_PREFIX = 4
"""Characters from which on a span's beginning is withheld where a caller's limit cut the answer off in it."""
HITS = 2
"""Tokens in a row that halt; of several that come at once the model gives what two in a row reach."""
EXAMINED_AGAIN, LEAST_AGAIN = 2, 32
"""Factor by which a watched or suspect answer grows until it is examined again, and least tokens then."""
HEARD_MORE = 1.0
"""A suspect answer is examined again when the logit of what was heard has grown by this."""
AT_ONCE = 4
"""Tokens that a model in no doubt reads at once, where twice as many at least are held back anyway."""
_ALL = 1 << 62
_EVERYWHERE = Position(_ALL, _ALL, _ALL)

_Held = tuple[Delta, int, Position]
"""A delta that waits: the tokens there were with it, and how far the hard list had read."""


class ChoiceScreen:
    """One choice: what listens to it, its place in the hard list, and what is held of it."""

    __slots__ = (
        "_channel",
        "_end",
        "_examine_at",
        "_examined_tokens",
        "_found",
        "_harm",
        "_held",
        "_hits",
        "_in_no_doubt",
        "_limit",
        "_listener",
        "_peak_harm",
        "_pending",
        "_previous",
        "_read_tokens",
        "_sampled_s",
        "_sampled_tokens",
        "_spans",
        "_suspect_from",
        "_target",
        "_terms",
        "_text",
        "_tokens",
        "_unread",
        "clean_until",
        "hit_at",
        "peak",
        "released",
        "suspected",
    )

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._held: deque[_Held] = deque()
        self._channel: tuple[str, int] | None = None
        self._listener = None if terms.model is None else terms.model.listen(terms.prior)
        self._harm = 0.0
        self._spans = None if terms.hard_list is None else SpanReader(terms.hard_list, terms.begun)
        self._tokens = 0
        self._sampled_tokens = -1
        self._sampled_s = 0.0
        self._limit = self._target = terms.clean
        self._unread = terms.continues
        self._pending = ""
        self._read_tokens = 0
        self._in_no_doubt = True
        self._hits = 0
        self.clean_until = 0
        self.hit_at = 0
        self.released = Counts()
        self.peak: Scores = {}
        """The scores that two tokens in a row have reached, where they are the highest and to be recorded."""
        self._peak_harm = terms.record_floor
        self._previous: tuple[float, Scores] | None = None
        self.suspected = False
        """Whether the choice is to be examined before more of it goes out."""
        self._text = HeardText()
        """The text, where answers are examined."""
        self._end: Delta | None = None
        """The last delta, where it came before the examination."""
        self._found: Scores = {}
        self._examined_tokens = 0
        self._suspect_from = terms.floor
        self._examine_at = float(terms.clean) if terms.examined and terms.watched else math.inf

    @property
    def held_tokens(self) -> int:
        return self._held[-1][1] - self.released.completion_tokens if self._held else 0

    # Reading

    def read(self, delta: Delta) -> Verdict | None:
        """Take in what a delta says; the verdict where that halts the answer."""
        tool, text, tokens = delta.tool, delta.text, delta.counts.completion_tokens
        channel = (delta.channel, 0 if tool is None else tool.index)
        if channel != self._channel and (text or tool is not None):  # a last delta may be of any
            if self._unread and self._channel is not None:
                self._unread += "\n"  # a word ends with its channel
            self._channel = channel
            self._text.turn_to(delta.channel, len(self._unread))
        if self._spans is not None and self._spells(self._spans, delta):
            self.clean_until, self.hit_at = self._tokens, tokens
            return self._terms.policy.halted()
        if tool is not None and tool.name:
            self._unread += f"{tool.name}\n"
        if self._pending or "\\" in text or "&" in text:
            text, self._pending = unescape(self._pending + text)
        self._unread += text
        if delta.finish_reason is not None:
            self._unread, self._pending = self._unread + self._pending, ""
        elif self._limit >= 2 * AT_ONCE and self._in_no_doubt and tokens - self._read_tokens < AT_ONCE:
            return None
        verdict = self._score(tokens)
        if delta.finish_reason is not None and self._text.ending:
            watched_more = self._terms.watched and tokens > self._examined_tokens
            unexamined = self._terms.examined and (watched_more or not self._in_no_doubt)
            self.suspected = self.suspected or unexamined or self._terms.examine_end
        return verdict

    def _spells(self, spans: SpanReader, delta: Delta) -> bool:
        """Whether a hard-listed span is complete; else how far one may be is known afterwards."""
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
            spans.turn_to(self._channel)
        return spans.finds(delta.text)

    def _score(self, tokens: int) -> Verdict | None:
        """Have the model read what it has not, up to token `tokens`; the verdict where that halts."""
        terms, listener, text = self._terms, self._listener, self._unread
        first, self._read_tokens = self._read_tokens + 1, tokens
        if listener is None or not text:
            return None
        self._unread = ""
        harm = self._harm = listener.feed(text)
        if terms.examined:
            self._suspect(text, harm, tokens, tokens - first + 1)
            return None
        if harm >= self._peak_harm:
            self._note_peak(harm, listener.scores(), num_tokens=tokens - first + 1)
        else:
            self._previous = None
        if terms.acting is not None and harm >= terms.doubt:
            scores = listener.scores()
            harm = max((scores.get(category, 0.0) for category in terms.acting), default=0.0)
        self._in_no_doubt = harm < terms.doubt
        if self._in_no_doubt:
            self._hits, self._target, self.clean_until = 0, terms.clean, tokens
            return None
        self.clean_until = min(self.clean_until, tokens - 1)  # a delta before may be of the same token
        if harm < terms.floor:
            self._hits = 0
            self._target = terms.clean + int(terms.grey * (harm - terms.doubt) / (terms.floor - terms.doubt))
            return None
        self._target = terms.clean + terms.grey
        verdict = terms.policy.judge_output(listener.scores(), watched=terms.watched)
        if not verdict.blocked:
            self._hits = 0
            return None
        if not self._hits:
            self.hit_at = first
        self._hits += max(1, tokens - first + 1)
        return verdict if self._hits >= HITS else None

    def _suspect(self, text: str, harm: float, tokens: int, num_tokens: int) -> None:
        """Where answers are examined: note whether this one is to be; hold more while it may become so."""
        terms = self._terms
        self._text.add(text)
        self._in_no_doubt = harm < terms.doubt
        if harm < terms.floor:
            self._hits, self._suspect_from = 0, terms.floor
            self._examine_at = self._examine_at if terms.watched else math.inf
        self.suspected = tokens >= self._examine_at
        if self._in_no_doubt:
            self._target, self.clean_until = terms.clean, tokens
            return
        self.clean_until = min(self.clean_until, tokens - 1)
        if harm < terms.floor:
            self._target = terms.clean + int(terms.grey * (harm - terms.doubt) / (terms.floor - terms.doubt))
            return
        if harm < self._suspect_from:  # examined already, and hardly more heard since
            self._hits, self._in_no_doubt, self._target, self.clean_until = 0, True, terms.clean, tokens
            return
        self._target = terms.clean + terms.grey
        if not self._hits:
            self.hit_at = tokens - num_tokens + 1
        self._hits += max(1, num_tokens)
        self.suspected = self.suspected or self._hits >= HITS

    def suspicion(self) -> Suspicion:
        """What is to be examined."""
        return Suspicion(self._text.ending, self._terms.prior, self._harm, self._text.opening)

    def suspend(self, delta: Delta) -> None:
        """Hold a delta until the choice is examined."""
        if delta.finish_reason is None:
            self._hold(delta)
        else:
            self._end = delta

    def examined(self, scores: Scores) -> Verdict | None:
        """Take what an examination found; the verdict where that halts the answer."""
        terms, self.suspected, self._examined_tokens = self._terms, False, self._read_tokens
        if harm_of(scores) >= harm_of(self._found):
            self._found = scores
        if harm_of(scores) >= self._peak_harm:
            self._peak_harm, self.peak = harm_of(scores), scores
        verdict = terms.policy.judge_output(scores, watched=terms.watched)
        if verdict.blocked:
            self.hit_at = self.hit_at or self._read_tokens
            return verdict
        self._suspect_from = max(terms.floor, _more(self._harm))
        self._hits, self.hit_at, self._in_no_doubt, self._target = 0, 0, True, terms.clean
        self.clean_until = self._read_tokens
        self._examine_at = min(self._examine_at, max(EXAMINED_AGAIN * self._read_tokens, LEAST_AGAIN))
        while self._examine_at <= self._read_tokens:
            self._examine_at = max(EXAMINED_AGAIN * self._examine_at, self._examine_at + 1)
        return None

    def resume(self) -> Sequence[Delta]:
        """What may be released now that the examination has let the choice go on."""
        end, self._end = self._end, None
        if end is not None:
            return self.end(end)
        tokens = self._tokens = self._read_tokens
        self._limit = self._target
        decided = _EVERYWHERE if self._spans is None else self._spans.decided()
        return self._release(tokens - self._limit, decided)

    def _note_peak(self, harm: float, scores: Scores, num_tokens: int) -> None:
        """Keep what two tokens in a row reach, which is what halts, where it is the most so far."""
        lower = now = (harm, scores)
        if num_tokens < HITS:
            if self._previous is None:
                self._previous = now
                return
            lower = min(now, self._previous, key=lambda pair: pair[0])
        self._previous = now
        if lower[0] >= self._peak_harm:
            self._peak_harm, self.peak = lower

    def verdict(self, *, scored: bool) -> Verdict:
        terms = self._terms
        if terms.examined:
            scores = self._found
        elif not scored and (clear := terms.policy.clear_output(self._harm, watched=terms.watched)):
            return clear
        else:
            scores = {} if self._listener is None else self._listener.scores()
        return terms.policy.judge_output(scores, watched=terms.watched)

    # Releasing

    def pass_on(self, delta: Delta) -> Sequence[Delta]:
        """What is old enough, and begins no hard-listed span; `delta` has been read."""
        terms, spans, tokens = self._terms, self._spans, delta.counts.completion_tokens
        self._limit = limit = max(self._target, self._limit - (tokens - self._tokens))
        self._tokens = tokens
        if not (limit or self._held or (spans is not None and spans.begun)):
            self.released = delta.counts  # what most tokens come to, and all that it costs them
            terms.held_s(0.0)
            return [delta]
        self._hold(delta)
        return self._release(tokens - limit, _EVERYWHERE if spans is None else spans.decided())

    def _hold(self, delta: Delta) -> None:
        position = _EVERYWHERE if self._spans is None else self._spans.position
        self._held.append((delta, delta.counts.completion_tokens, position))
        if self._sampled_tokens < 0:
            self._sampled_tokens, self._sampled_s = delta.counts.completion_tokens, self._terms.clock_s()

    def _release(self, old: int, decided: Position) -> list[Delta]:
        held = self._held
        plain, shown, spelled = decided
        out: list[Delta] = []
        while held:
            delta, tokens, position = held[0]
            if tokens > old or position[0] > plain or position[1] > shown or position[2] > spelled:
                break
            out.append(delta)
            held.popleft()
        if out:
            self.released = out[-1].counts
            if 0 <= self._sampled_tokens <= self.released.completion_tokens:
                self._terms.held_s(self._terms.clock_s() - self._sampled_s)
                self._sampled_tokens = -1
        return out

    def end(self, delta: Delta) -> Sequence[Delta]:
        """What is held and the last delta; less what is in doubt where a caller could choose the end."""
        self._hold(delta)
        if not self._chosen_by_caller(delta):
            return self._release(_ALL, _EVERYWHERE)
        stop = delta.matched_stop
        if stop is not None and self._spans is not None and (self._spans.begun or self._names_span(stop)):
            stop = None
        out = self._release_judged(1 if delta.finish_reason == "abort" else MIN_PREFIX)
        withheld, self._held = bool(self._held), deque()
        if not withheld:
            return [*out[:-1], out[-1]._replace(matched_stop=stop)] if stop != delta.matched_stop else out
        counts = self.released
        if not counts.prompt_tokens:
            counts = delta.counts._replace(completion_tokens=0, reasoning_tokens=0)
        return [
            *out,
            delta._replace(
                text="",
                token_ids=(),
                logprobs=None,
                tool=None,
                counts=counts,
                finish_reason=self._reason(delta),
                matched_stop=None,
            ),
        ]

    def _chosen_by_caller(self, delta: Delta) -> bool:
        """Whether the request may have set where this end lies, and not the model."""
        if delta.finish_reason not in ("stop", "tool_calls"):
            return True
        stop = delta.matched_stop
        return self._terms.steered or isinstance(stop, str) or stop in self._terms.stop_ids

    def _names_span(self, stop: str | int) -> bool:
        hard_list = self._terms.hard_list
        return hard_list is not None and isinstance(stop, str) and hard_list.found_in(stop)

    def _reason(self, delta: Delta) -> FinishReason | None:
        """Why a choice ended of which something is withheld: an end like the model's own would be untrue."""
        if self._hits or (
            not self._in_no_doubt
            and not isinstance(delta.matched_stop, str)
            and delta.finish_reason in ("stop", "tool_calls")
        ):
            return "content_filter"
        return delta.finish_reason

    def _release_judged(self, shortest: int) -> list[Delta]:
        """Up to where the model was in no doubt, and no span of so many letters had begun."""
        decided = _EVERYWHERE if self._spans is None else self._spans.decided(shortest)
        return self._release(_ALL if self._in_no_doubt else self.clean_until, decided)

    def cut_off(self) -> Sequence[Delta]:
        """What may go out of a choice that will say no more."""
        halted = self._score(self._tokens) is not None  # some may be unread
        if self._terms.examined and (self.suspected or self._terms.watched):
            self._in_no_doubt = False
            if self._terms.watched:
                self.clean_until = min(self.clean_until, self._examined_tokens)
        out = [] if halted else self._release_judged(1)
        self._held.clear()
        return out

    @property
    def held(self) -> list[Delta]:
        held = [held[0] for held in self._held]
        return held if self._end is None else [*held, self._end]

    def give_up(self) -> list[Delta]:
        held = self.held
        self._held.clear()
        return held


def _more(harm: float) -> float:
    """The harm whose logit is greater by HEARD_MORE; none is, of one that is as high as numbers go."""
    if not 0.0 < harm < 1.0:
        return math.inf if harm else 0.0
    return 1.0 / (1.0 + (1.0 - harm) / harm * math.exp(-HEARD_MORE))
