"""The stream screen: every delta goes in, and comes out once what it says is ruled harmless enough.

    engine ──▶ feed ──▶ [held: newest tokens of each choice] ──▶ released, per choice in order
                 └─ hard-listed span, or two hits in a row ──▶ halted: what is held is dropped

The hold-back is elastic, in tokens: none while the model is in no doubt, for to build it up would take
gaps that every reader sees. The more it is in doubt, the more are held; they are let go again two for each
that comes. Where the prompt is watched many are held from the first on. The beginning of what may
become a hard-listed span is held until it is ruled out, however long that takes. Everything is
read before it goes out: answer, reasoning, tool names and arguments, logprobs.

Synchronous and incremental: a token costs its own characters, whatever came before.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.core import Counts, Delta
from app.safety.hard_list import FOUND, HardList, compiled
from app.safety.json_text import unescaped
from app.safety.stream_terms import HoldBack, Listener, Listens, Rules, Terms
from app.safety.verdict import Verdict

MIN_PREFIX = 4
"""Characters from which on a span's beginning is withheld where a caller's limit cut the answer off in it."""
HITS = 2
"""Tokens in a row that halt; of several that come at once the model gives what two in a row reach."""
AT_ONCE = 4
"""Tokens that a model in no doubt reads at once, where twice as many at least are held back anyway."""
_ALL = 1 << 62
GREY_PART = 0.55
"""Of the lowest threshold: from here on the model is in doubt."""


class StreamScreen:
    """Makes the screenings of all requests. `model` None looks for hard-listed spans alone."""

    def __init__(
        self,
        model: Listens | None,
        hold_back: HoldBack = HoldBack(),  # noqa: B008  # a tuple
        held_s: Callable[[float], None] = lambda _seconds: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._model = model
        self._hold_back = hold_back
        self._held_s = held_s
        self._clock_s = clock_s
        self._policy: Rules | None = None
        self._floors = (math.inf, math.inf)
        """Of that policy, the lowest harm that may halt: of an answer, and of one to a watched prompt."""
        self._spans: Sequence[str] = ()
        self._hard_list: HardList | None = None

    def for_request(self, n: int, watched: bool, prior: float, policy: Rules) -> Screening:  # noqa: FBT001
        """The screening of one request's `n` choices, whose prompt had the harm `prior`."""
        if policy is not self._policy:
            self._take(policy)
        hold_back, floor = self._hold_back, self._floors[watched]
        terms = Terms(
            model=self._model,
            hard_list=self._hard_list,
            policy=policy,
            prior=prior,
            watched=watched,
            floor=floor,
            doubt=floor * GREY_PART,
            clean=hold_back.watched if watched else hold_back.clean,
            grey=hold_back.watched_grey if watched else hold_back.grey,
            held_s=self._held_s,
            clock_s=self._clock_s,
        )
        return Screening([_Choice(terms) for _ in range(n)])

    def _take(self, policy: Rules) -> None:
        """Work out what all requests under a policy have in common."""
        if policy.hard_list is not self._spans:
            self._hard_list, self._spans = compiled(policy.hard_list), policy.hard_list
        lowest = [
            min(policy.output_thresholds(watched=watched), default=math.inf) for watched in (False, True)
        ]
        self._floors = (lowest[0], lowest[1])
        self._policy = policy


class Screening:
    """One request's answer, on its way out."""

    def __init__(self, choices: Sequence[_Choice] = ()) -> None:
        self._choices = choices
        self.halted: Verdict | None = None
        """The verdict that ended it; what was held then is dropped, and nothing more comes out."""
        self.halted_choice: int | None = None
        self.leaked_tokens = 0
        """Released of the halted choice after the last token of which the model was in no doubt."""
        self.hit_at = 0
        """Its first token, counted from 1, that reached the threshold."""
        self._withheld_text = ""

    @property
    def held_tokens(self) -> int:
        """Tokens that are held back now, over all choices."""
        return sum(choice.held_tokens for choice in self._choices)

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """What may be released now that `delta` has come."""
        if self.halted is not None:
            return ()
        choice = self._choices[delta.choice]
        verdict = choice.read(delta)
        if verdict is None:
            return choice.pass_on(delta) if delta.finish_reason is None else choice.end(delta)
        self.halted_choice = delta.choice
        self.hit_at = choice.hit_at
        self.leaked_tokens = max(0, choice.released.completion_tokens - choice.clean_until)
        self.halted = replace(verdict, lag_tokens=delta.counts.completion_tokens - choice.hit_at)
        self._withheld_text = "".join(held.text for held in choice.held) + delta.text
        self.give_up()
        return ()

    def take_withheld_text(self) -> str:
        """What the halted choice held back, once: to be hashed, and never to be kept."""
        text, self._withheld_text = self._withheld_text, ""
        return text

    def drain(self) -> Sequence[Delta]:
        """What may be released of an answer that broke off: nothing more will come."""
        return [delta for choice in self._choices for delta in choice.cut_off()]

    def give_up(self) -> list[Delta]:
        """Let go of what is held, in no state to be released."""
        return [delta for choice in self._choices for delta in choice.give_up()]

    def verdicts(self, *, scored: bool = True) -> list[Verdict]:
        """How each choice stands, or was halted; for OpenAI's `moderation` object.

        Not `scored`, those that no category can do anything about may have no scores.
        """
        verdicts = [choice.verdict(scored=scored) for choice in self._choices]
        if self.halted is not None and self.halted_choice is not None:
            verdicts[self.halted_choice] = self.halted
        return verdicts


class _Lane:
    """One channel of a choice: what of its text is not decided yet."""

    __slots__ = ("after_space", "escape", "harm", "is_json", "listener", "state")

    def __init__(self, listener: Listener | None, *, is_json: bool) -> None:
        self.state = 0
        self.after_space = False
        self.is_json = is_json
        self.escape = ""
        self.harm = 0.0
        self.listener = listener


_Held = tuple[Delta, int, int, int]
"""A delta that waits: the tokens there were with it, and the folded characters of lanes and logprobs."""


class _Choice:
    """One choice: its lanes, its place in the hard list, and what is held of it."""

    __slots__ = (
        "_channel",
        "_held",
        "_hits",
        "_in_no_doubt",
        "_lane",
        "_lanes",
        "_limit",
        "_read_tokens",
        "_said",
        "_sampled_s",
        "_sampled_tokens",
        "_spelled",
        "_spelling",
        "_target",
        "_terms",
        "_tokens",
        "_unread",
        "clean_until",
        "hit_at",
        "released",
    )

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._held: deque[_Held] = deque()
        self._lanes: dict[tuple[str, int], _Lane] = {}
        self._channel: tuple[str, int] = ("text", 0)
        self._lane = self._lanes[self._channel] = self._new_lane(is_json=False)
        self._spelling = _Lane(None, is_json=False)
        self._said = 0
        self._spelled = 0
        self._tokens = 0
        self._sampled_tokens = -1
        self._sampled_s = 0.0
        self._limit = self._target = terms.clean
        self._unread = ""
        self._read_tokens = 0
        self._in_no_doubt = True
        self._hits = 0
        self.clean_until = 0
        self.hit_at = 0
        self.released = Counts()

    def _new_lane(self, *, is_json: bool) -> _Lane:
        model = self._terms.model
        return _Lane(None if model is None else model.listen(self._terms.prior), is_json=is_json)

    @property
    def held_tokens(self) -> int:
        return self._held[-1][1] - self.released.completion_tokens if self._held else 0

    # Reading

    def read(self, delta: Delta) -> Verdict | None:
        """Take in what a delta says; the verdict where that halts the answer."""
        tool = delta.tool
        channel = (delta.channel, 0 if tool is None else tool.index)
        if channel != self._channel and (delta.text or tool is not None):  # a last delta may be of any
            verdict = self._score(self._tokens)
            self._turn_to(channel)
            if verdict is not None:
                return verdict
        hard_list = self._terms.hard_list
        if hard_list is not None and self._spells(hard_list, delta):
            self.clean_until, self.hit_at = self._tokens, delta.counts.completion_tokens
            return self._terms.policy.halted()
        self._unread += delta.text
        tokens = delta.counts.completion_tokens
        if (
            self._limit >= 2 * AT_ONCE
            and self._in_no_doubt
            and tokens - self._read_tokens < AT_ONCE
            and delta.finish_reason is None
        ):
            return None
        return self._score(tokens)

    def _turn_to(self, channel: tuple[str, int]) -> None:
        """Go on in another lane. What the last one may have begun is given up, unless it goes on there."""
        lane = self._lanes.get(channel)
        if lane is None:
            lane = self._lanes[channel] = self._new_lane(is_json=channel[0] == "tool")
        self._channel, self._lane = channel, lane

    def _spells(self, hard_list: HardList, delta: Delta) -> bool:
        """Whether a hard-listed span is complete; else how far one may be is known afterwards."""
        if delta.tool is not None and delta.tool.name and hard_list.found_in(delta.tool.name):
            return True
        if delta.logprobs and self._is_spelled(hard_list, delta.logprobs):
            return True
        if not delta.text:
            return False
        self._said += _walk(hard_list, self._lane, delta.text)
        return self._lane.state == FOUND

    def _is_spelled(self, hard_list: HardList, entries: Sequence[Mapping[str, Any]]) -> bool:
        """Logprobs say the tokens, and others that were likely, which may not be in the text at all."""
        text = "".join(entry["token"] for entry in entries)
        self._spelled += _walk(hard_list, self._spelling, text)
        if self._spelling.state == FOUND:
            return True
        others = (other["token"] for entry in entries for other in entry.get("top_logprobs") or ())
        return any(map(hard_list.found_in, others))

    def _score(self, tokens: int) -> Verdict | None:
        """Have the model read what it has not, up to token `tokens`; the verdict where that halts."""
        terms, listener, text = self._terms, self._lane.listener, self._unread
        first, self._read_tokens = self._read_tokens + 1, tokens
        if listener is None or not text:
            return None
        self._unread = ""
        harm = self._lane.harm = listener.feed(text)
        self._in_no_doubt = harm < terms.doubt
        if self._in_no_doubt:
            self._hits, self._target, self.clean_until = 0, terms.clean, tokens
            return None
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

    def verdict(self, *, scored: bool) -> Verdict:
        terms = self._terms
        if not scored:
            harm = max(lane.harm for lane in self._lanes.values())
            clear = terms.policy.clear_output(harm, watched=terms.watched)
            if clear is not None:
                return clear
        listeners = [lane.listener for lane in self._lanes.values() if lane.listener is not None]
        scores: dict[str, float] = {}
        for listener in listeners:
            for category, p in listener.scores().items():
                scores[category] = max(p, scores.get(category, 0.0))
        return terms.policy.judge_output(scores, watched=terms.watched)

    # Releasing

    def pass_on(self, delta: Delta) -> Sequence[Delta]:
        """What is old enough, and begins no hard-listed span; `delta` has been read."""
        terms, tokens = self._terms, delta.counts.completion_tokens
        self._limit = limit = max(self._target, self._limit - (tokens - self._tokens))
        self._tokens = tokens
        hard_list = terms.hard_list
        if not (limit or self._held or (hard_list is not None and self._begins_span())):
            self.released = delta.counts  # what most tokens come to, and all that it costs them
            terms.held_s(0.0)
            return [delta]
        self._hold(delta)
        if hard_list is None:
            return self._release(tokens - limit, 0, 0)
        return self._release(tokens - limit, *self._decided(hard_list))

    def _begins_span(self) -> bool:
        """Whether the end of what was said, or spelled, may yet become a span."""
        return bool(self._lane.state or self._lane.escape or self._spelling.state)

    def _hold(self, delta: Delta) -> None:
        said = self._said + 1 if self._lane.escape else self._said
        self._held.append((delta, delta.counts.completion_tokens, said, self._spelled))
        if self._sampled_tokens < 0:
            self._sampled_tokens, self._sampled_s = delta.counts.completion_tokens, self._terms.clock_s()

    def _decided(self, hard_list: HardList, least: int = 1) -> tuple[int, int]:
        """Up to which folded character no span has begun, in lanes and logprobs; shorter ones apart."""
        depth, spelled_depth = hard_list.depth[self._lane.state], hard_list.depth[self._spelling.state]
        return (
            self._said - depth if depth >= least else self._said + (least > 1),
            self._spelled - spelled_depth if spelled_depth >= least else self._spelled,
        )

    def _release(self, old: int, said: int, spelled: int) -> Sequence[Delta]:
        held = self._held
        out: list[Delta] = []
        while held:
            delta, tokens, its_said, its_spelled = held[0]
            if tokens > old or its_said > said or its_spelled > spelled:
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
        """Everything held and the choice's last delta, less a span's beginning that was cut off in it."""
        self._hold(delta)
        if delta.finish_reason in ("stop", "tool_calls") and not isinstance(delta.matched_stop, str):
            return self._release(_ALL, _ALL, _ALL)
        out = self.cut_off(1 if delta.finish_reason == "abort" else MIN_PREFIX)
        if not out or out[-1] is not delta:
            counts = self.released
            if not counts.prompt_tokens:
                counts = delta.counts._replace(completion_tokens=0, reasoning_tokens=0)
            out = [*out, delta._replace(text="", token_ids=(), logprobs=None, tool=None, counts=counts)]
        return out

    def cut_off(self, least: int = 1) -> Sequence[Delta]:
        """What may go out of a choice that will say no more, less so many letters of a span's beginning."""
        hard_list = self._terms.hard_list
        decided = (_ALL, _ALL) if hard_list is None else self._decided(hard_list, least)
        halted = self._score(self._tokens) is not None  # of an answer that broke off, some may be unread
        out = () if halted else self._release(_ALL, *decided)
        self._held.clear()
        return out

    @property
    def held(self) -> list[Delta]:
        return [held[0] for held in self._held]

    def give_up(self) -> list[Delta]:
        held = self.held
        self._held.clear()
        return held


def _walk(hard_list: HardList, lane: _Lane, text: str) -> int:
    """Read `text` in a lane; returns how many folded characters it was."""
    if lane.is_json:
        text, lane.escape = unescaped(lane.escape + text)
    folded = hard_list.fold(text, after_space=lane.after_space)
    if folded:
        lane.state = hard_list.walk(lane.state, folded)
        lane.after_space = folded[-1] == " "
    return len(folded)
