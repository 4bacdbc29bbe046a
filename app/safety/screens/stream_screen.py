"""The stream screen: every delta goes in, and comes out once what it says is ruled harmless enough.

    engine ──▶ feed ──▶ [held: newest tokens of each choice] ──▶ released, per choice in order
                 └─ hard-listed span, or two hits in a row ──▶ halted: what is held is dropped

The hold-back is elastic, in tokens: none while the model is in no doubt, for to build it up would take
gaps that every reader sees. The more it is in doubt, the more are held; they are let go again two for each
that comes. What the model suspects is held until a slower one has examined it (`examined`). Where the prompt
is watched, that happens after the first tokens, and again each time the answer has doubled. The beginning of
what may become a hard-listed span is held until it is ruled out, however long that takes. Everything is read
before it goes out: answer, reasoning, tool names and arguments, logprobs.

Synchronous and incremental: a token costs its own characters, whatever came before.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from app.core import Delta
from app.safety.categories import CATEGORIES
from app.safety.screens.choice_screen import ChoiceScreen
from app.safety.screens.span_reader import begun_in
from app.safety.screens.stream_terms import (
    UNSTEERED,
    Examine,
    HoldBack,
    Listens,
    Rules,
    Steering,
    Terms,
)
from app.safety.text.hard_list import HardList, compiled
from app.safety.verdict import Scores, ScreenBusy, ScreenFailed, Verdict

CONTINUED_CHARS = 2_000
"""Of the message that an answer goes on with, what the model of answers hears: about 500 tokens, 2 ms."""
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
        *,
        examine: Examine | None = None,
    ) -> None:
        """`examine` reads what the model suspects.

        Without it, or with a model that has no `suspect_at`, the model's own scores halt.
        """
        self._model = model
        self._suspect_at = None if model is None or examine is None else model.suspect_at
        self._examine = examine
        self._hold_back = hold_back
        self._held_s = held_s
        self._clock_s = clock_s
        self._policy: Rules | None = None
        self._floors = (math.inf, math.inf)
        """Of that policy, the lowest harm that may halt: of an answer, and of one to a watched prompt."""
        self._acting: tuple[Collection[str] | None, ...] = (None, None)
        """The categories that may halt these; None for all."""
        self._spans: Sequence[str] = ()
        self._hard_list: HardList | None = None

    def for_request(
        self,
        n: int,
        watched: bool,  # noqa: FBT001
        prior: float,
        policy: Rules,
        *,
        owner: str = "",
        steering: Steering = UNSTEERED,
        examine_end: bool = False,
        on_broken: Callable[[Exception], None] = lambda _exc: None,
        fail_open: bool = False,
    ) -> Screening:
        """The screening of one request's `n` choices, whose prompt had the harm `prior`."""
        if policy is not self._policy:
            self._take(policy)
        hold_back, hard_list, suspect_at = self._hold_back, self._hard_list, self._suspect_at
        floor = self._floors[watched] if suspect_at is None else suspect_at
        tail = steering.last_said
        terms = Terms(
            model=self._model,
            hard_list=hard_list,
            begun=begun_in(hard_list, tail),
            continues=tail[-CONTINUED_CHARS:] if steering.continues else "",
            steered=steering.steered,
            stop_ids=steering.stop_ids,
            policy=policy,
            prior=prior,
            watched=watched,
            floor=floor,
            doubt=floor * GREY_PART,
            acting=self._acting[watched],
            examined=suspect_at is not None,
            examine_end=examine_end and suspect_at is not None,
            record_floor=policy.answer_record_floor,
            clean=hold_back.watched if watched else hold_back.clean,
            grey=hold_back.watched_grey if watched else hold_back.grey,
            held_s=self._held_s,
            clock_s=self._clock_s,
        )
        choices = [ChoiceScreen(terms) for _ in range(n)]
        return Screening(choices, owner, examine=self._examine, on_broken=on_broken, fail_open=fail_open)

    def _take(self, policy: Rules) -> None:
        """Work out what all requests under a policy have in common."""
        if policy.hard_list is not self._spans:
            self._hard_list, self._spans = compiled(policy.hard_list), policy.hard_list
        thresholds = [policy.output_thresholds(watched=watched) for watched in (False, True)]
        self._floors = (min(thresholds[0], default=math.inf), min(thresholds[1], default=math.inf))
        self._acting = tuple(map(_acting, thresholds))
        self._policy = policy


def _acting(thresholds: Sequence[float]) -> Collection[str] | None:
    """The categories of which the thresholds are finite; None where all are."""
    if math.inf not in thresholds:
        return None
    return frozenset(c for c, at in zip(CATEGORIES, thresholds, strict=True) if at < math.inf)


class Screening:
    """One request's answer, on its way out. Where it throws, the answer ends, or all of it is let pass."""

    def __init__(
        self,
        choices: Sequence[ChoiceScreen] = (),
        owner: str = "",
        *,
        examine: Examine | None = None,
        on_broken: Callable[[Exception], None] = lambda _exc: None,
        fail_open: bool = False,
        broken: bool = False,
    ) -> None:
        """`on_broken` is called with what the screening threw, once; after it `broken` is set."""
        self._choices = choices
        self._owner = owner
        self._examine = examine
        self._suspected: list[ChoiceScreen] = []
        self._on_broken = on_broken
        self._fail_open = fail_open
        self.broken = broken
        self._busy = False
        self.halted: Verdict | None = None
        """The verdict that ended it; what was held then is dropped, and nothing more comes out."""
        self.halted_choice: int | None = None
        self.leaked_tokens = 0
        """Released of the halted choice after the last token of which the model was in no doubt."""
        self.hit_at = 0
        """Its first token, counted from 1, that reached the threshold."""
        self._withheld_text = ""

    @property
    def suspects(self) -> bool:
        """Whether a choice is held until it is examined."""
        return bool(self._suspected)

    @property
    def held_tokens(self) -> int:
        """Tokens that are held back now, over all choices."""
        return sum(choice.held_tokens for choice in self._choices)

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """What may be released now that `delta` has come. Raises ScreenFailed."""
        if self.halted is not None:
            return ()
        if self.broken:
            return self._unscreened([delta])
        try:
            choice = self._choices[delta.choice]
            verdict = choice.read(delta)
            if verdict is None and not choice.suspected:
                return choice.pass_on(delta) if delta.finish_reason is None else choice.end(delta)
            if verdict is None:
                choice.suspend(delta)
                self._suspected.append(choice)
            else:
                self._halt(verdict, choice, delta)
        except Exception as exc:  # noqa: BLE001  # whatever it is, nothing goes on unscreened
            held = self._break(exc)
            return self._unscreened(held if delta in held else [*held, delta])
        return ()

    async def examined(self) -> Sequence[Delta]:
        """What may be released of the suspected choices, once they are examined. Raises ScreenFailed."""
        released: list[Delta] = []
        while self._suspected and self.halted is None:
            choice = self._suspected.pop()
            try:
                assert self._examine is not None
                released += self._settle(choice, await self._examine(choice.suspicion(), self._owner))
            except Exception as exc:  # noqa: BLE001  # whatever it is, nothing goes on unscreened
                self._suspected.clear()
                return [*released, *self._unscreened(self._break(exc))]
        return released

    def _settle(self, choice: ChoiceScreen, scores: Scores) -> Sequence[Delta]:
        """What may be released of a suspected choice that an examination gave these scores."""
        verdict = choice.examined(scores)
        if verdict is None:
            return choice.resume()
        self._halt(verdict, choice, None)
        return ()

    def _halt(self, verdict: Verdict, choice: ChoiceScreen, delta: Delta | None) -> None:
        held = choice.held if delta is None else [*choice.held, delta]
        self.halted_choice = self._choices.index(choice)
        self.hit_at = choice.hit_at
        self.leaked_tokens = max(0, choice.released.completion_tokens - choice.clean_until)
        self.halted = replace(verdict, lag_tokens=held[-1].counts.completion_tokens - choice.hit_at)
        self._withheld_text = "".join(each.text for each in held)
        self._give_up()

    def _break(self, exc: Exception) -> list[Delta]:
        """Screen nothing more; returns what was held."""
        self.broken = True
        self._busy = isinstance(exc, ScreenBusy)  # which lets nothing pass
        self._on_broken(exc)
        return self._give_up()

    def _unscreened(self, deltas: list[Delta]) -> list[Delta]:
        if self._busy or not self._fail_open:
            raise (ScreenBusy if self._busy else ScreenFailed) from None
        return deltas

    def _give_up(self) -> list[Delta]:
        """Let go of what is held, in no state to be released."""
        return [delta for choice in self._choices for delta in choice.give_up()]

    def take_withheld_text(self) -> str:
        """What the halted choice held back, once: to be hashed, and never to be kept."""
        text, self._withheld_text = self._withheld_text, ""
        return text

    def drain(self) -> Sequence[Delta]:
        """What may be released of an answer that broke off; nothing where this throws."""
        if self.broken:
            return ()
        try:
            return [delta for choice in self._choices for delta in choice.cut_off()]
        except Exception as exc:  # noqa: BLE001  # the answer has another error already
            self._break(exc)
            return ()

    def peaks(self) -> list[Scores]:
        """Of each choice, the scores at its most harmful, where any policy could make something of them."""
        return [choice.peak for choice in self._choices]

    def verdicts(self, *, scored: bool = True) -> list[Verdict]:
        """How each choice stands, or was halted; for OpenAI's `moderation` object. None where it broke.

        Not `scored`, those that no category can do anything about may have no scores.
        """
        if self.broken:
            return []
        try:
            verdicts = [choice.verdict(scored=scored) for choice in self._choices]
        except Exception as exc:  # noqa: BLE001  # every delta was screened
            self._break(exc)
            return []
        if self.halted is not None and self.halted_choice is not None:
            verdicts[self.halted_choice] = self.halted
        return verdicts
