"""The stream screen: every delta is fed, and released once it is found harmless enough.

    engine ──▶ feed ──▶ [held: newest tokens of each choice] ──▶ released, per choice in order
                 ├─ two hits in a row ──▶ review by the second stage ──▶ released, or halted
                 └─ hard-listed span ──▶ halted: the held text is dropped

The hold-back is elastic, in tokens. Without doubt nothing is held: filling a hold-back would pause every
reader's stream. The more doubt, the more tokens are held; after it two are released for each that arrives.
The beginning of a possible hard-listed span is held until it is ruled out, however long that takes.
Everything is read before its release: answer, reasoning, tool names and arguments, logprobs.

Synchronous and incremental: a token costs its own characters, whatever stands before it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from app.core import Delta
from app.safety.policies.policy import Policy
from app.safety.stream.answer_context import AnswerContext
from app.safety.stream.answer_review import AnswerClassifier, Review
from app.safety.stream.choice_screen import CLEAR, HELD, REVIEW, ChoiceScreen, ScreenSetup
from app.safety.stream.span_reader import match_state
from app.safety.text.hard_list import compiled
from app.safety.thresholds import CONTINUED_CHARS
from app.safety.verdict import Scores, ScreenBusy, ScreenFailed, Verdict


class StreamScreen:
    """Makes a `Screening` for each request, with the classifier of every token and the one of reviews."""

    def __init__(
        self,
        classifier: AnswerClassifier,
        review: Review,
        on_held: Callable[[float, int], None] = lambda _seconds, _deltas: None,
        clock_s: Callable[[], float] = time.monotonic,
    ) -> None:
        """`on_held` is called with the seconds for which deltas were held, and their number."""
        self._classifier = classifier
        self._review = review
        self._on_held = on_held
        self._clock_s = clock_s
        self._spans: Sequence[str] = ()
        self._hard_list = compiled(())

    def for_request(
        self,
        n: int,
        watched: bool,  # noqa: FBT001
        prompt_harm: float,
        policy: Policy,
        *,
        owner: str = "",
        context: AnswerContext = AnswerContext(),  # noqa: B008  # a tuple
        scores_wanted: bool = False,
        on_broken: Callable[[Exception], None] = lambda _exc: None,
        fail_open: bool = False,
    ) -> Screening:
        """The screening of one request's `n` choices, whose prompt had the harm `prompt_harm`."""
        if policy.hard_list is not self._spans:
            self._hard_list, self._spans = compiled(policy.hard_list), policy.hard_list
        setup = ScreenSetup(
            classifier=self._classifier,
            policy=policy,
            hard_list=self._hard_list,
            match=match_state(self._hard_list, context.preceding_text),
            continued=context.preceding_text[-CONTINUED_CHARS:] if context.continues else "",
            context=context,
            prompt_harm=prompt_harm,
            watched=watched,
            scores_wanted=scores_wanted,
            on_held=self._on_held,
            clock_s=self._clock_s,
        )
        choices = [ChoiceScreen(setup) for _ in range(n)]
        return Screening(choices, owner, review=self._review, on_broken=on_broken, fail_open=fail_open)


class Screening:
    """The screening of one request's answer. If it fails, the answer ends, or passes unscreened (fail open).

    `state` is that of the choice that was read last. In REVIEW, `review` is awaited before another delta is
    fed. HALTED is for all choices, and final.
    """

    def __init__(
        self,
        choices: Sequence[ChoiceScreen] = (),
        owner: str = "",
        *,
        review: Review | None = None,
        on_broken: Callable[[Exception], None] = lambda _exc: None,
        fail_open: bool = False,
        broken: bool = False,
    ) -> None:
        """`on_broken` is called with what the screening threw, once; after it `broken` is set."""
        self._choices = choices
        self._owner = owner
        self._review = review
        self._on_broken = on_broken
        self._fail_open = fail_open
        self.broken = broken
        self._busy = False
        self.state = CLEAR
        self._in_review: ChoiceScreen | None = None
        """The choice that is in review."""
        self.halted: Verdict | None = None
        """The verdict that halted the answer."""
        self.halted_choice: int | None = None
        self.leaked_tokens = 0
        """Tokens of the halted choice that were released after the last one without doubt."""
        self.hit_at = 0
        """Its first token, counted from 1, that reached the threshold."""
        self._withheld_text = ""

    @property
    def in_review(self) -> bool:
        """True if `review` is to be awaited before another delta is fed."""
        return self.state is REVIEW

    @property
    def held_tokens(self) -> int:
        """Tokens that are held back now, over all choices."""
        return sum(choice.held.tokens for choice in self._choices)

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """The deltas that may be released after `delta`. Raises ScreenFailed."""
        if self.halted is not None:
            return ()
        if self.broken:
            return self._unscreened([delta])
        try:
            assert self._in_review is None, "fed in review"
            choice = self._choices[delta.choice]
            state = self.state = choice.read(delta)
            if state is CLEAR:
                return [delta]
            if state is HELD:
                return choice.release()
            if state is REVIEW:
                self._in_review = choice
            else:
                self._halt(choice)
        except Exception as exc:  # noqa: BLE001  # any error: nothing is released unscreened
            held = self._break(exc)
            return self._unscreened(held if delta in held else [*held, delta])
        return ()

    async def review(self) -> Sequence[Delta]:
        """The deltas that may be released after the review. Raises ScreenFailed, ScreenBusy."""
        choice, self._in_review = self._in_review, None
        try:
            assert choice is not None, "not in review"
            assert self._review is not None
            self.state = choice.take_scores(await self._review(choice.doubt.request(), self._owner))
            if self.state is HELD:
                return choice.release()
            self._halt(choice)
        except Exception as exc:  # noqa: BLE001  # same
            return self._unscreened(self._break(exc))
        return ()

    def _halt(self, choice: ChoiceScreen) -> None:
        assert choice.verdict is not None
        held, doubt = choice.held.drop(), choice.doubt
        self.halted_choice = self._choices.index(choice)
        self.hit_at, self.leaked_tokens = doubt.hit_at, choice.leaked_tokens
        lag_tokens = held[-1].counts.completion_tokens - doubt.hit_at
        self.halted = replace(choice.verdict, lag_tokens=lag_tokens)
        self._withheld_text = "".join(each.text for each in held)
        self._drop_held()

    def _break(self, exc: Exception) -> list[Delta]:
        """Screen nothing more; returns what was held."""
        self.broken, self.state, self._in_review = True, CLEAR, None
        self._busy = isinstance(exc, ScreenBusy)  # if it is busy, nothing passes, even with `fail_open`
        self._on_broken(exc)
        return self._drop_held()

    def _unscreened(self, deltas: list[Delta]) -> list[Delta]:
        if self._busy or not self._fail_open:
            raise (ScreenBusy if self._busy else ScreenFailed) from None
        return deltas

    def _drop_held(self) -> list[Delta]:
        return [delta for choice in self._choices for delta in choice.held.drop()]

    def take_withheld_text(self) -> str:
        """The text that the halted choice held back, once: to be hashed, and never to be kept."""
        text, self._withheld_text = self._withheld_text, ""
        return text

    def take_releasable(self) -> Sequence[Delta]:
        """The deltas that may be released of an interrupted answer; none if the screen fails."""
        if self.broken:
            return ()
        try:
            return [delta for choice in self._choices for delta in choice.break_off()]
        except Exception as exc:  # noqa: BLE001  # the answer has another error already
            self._break(exc)
            return ()

    def peaks(self) -> list[Scores]:
        """Of each choice, the highest scores of its reviews, where any policy could act on them."""
        return [choice.doubt.recordable_findings() for choice in self._choices]

    def verdicts(self) -> list[Verdict]:
        """The verdict on each choice, for OpenAI's `moderation` object. Empty where the screening broke."""
        if self.broken:
            return []
        try:
            verdicts = [choice.doubt.verdict() for choice in self._choices]
        except Exception as exc:  # noqa: BLE001  # every delta was screened
            self._break(exc)
            return []
        if self.halted is not None and self.halted_choice is not None:
            verdicts[self.halted_choice] = self.halted
        return verdicts
