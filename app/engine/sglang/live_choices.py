"""The choices that the engine has not ended: the request that was sent for each, and its output so far.

A choice outlives the engine that generates it. It keeps the token ids that its sink has taken, so that
another engine can continue behind them (app.engine.sglang.patches.continued_requests). That engine hands over
all of the answer again; a `Replay` drops what the sink has already.
"""

from __future__ import annotations

import itertools
from array import array
from collections.abc import Callable, Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, NamedTuple

from app.core import Counts
from app.engine.sink import ChoiceSink, TokenTally
from app.errors import ServingError

PROGRESS_TOKENS = 8
"""New tokens after which a choice is not what an engine died of; one that is may get a few."""
ABORTED = {"type": "abort"}

Finish = dict[str, Any] | None
Step = tuple[Any, int]
"""SGLang's batch, and the choice's row in it; logprobs are read there."""
NO_STEP: Step = (None, 0)


class StepBatch(NamedTuple):
    """The columns of SGLang's BatchStrOutput that are handed over, by its names.

    That has sixty, which take the server ten times as long to unpickle (58 us against 6, 16 rows).
    """

    rids: list[str]
    output_strs: list[str]
    output_ids: list[list[int]]
    finished_reasons: list[Finish]
    prompt_tokens: list[int]
    completion_tokens: list[int]
    cached_tokens: list[int]
    reasoning_tokens: list[int]
    retraction_counts: list[int]
    output_token_logprobs_val: Any
    output_token_logprobs_idx: Any
    output_top_logprobs_val: Any
    output_top_logprobs_idx: Any


def choice_id(rid: str, index: int) -> str:
    """The id under which SGLang knows a choice of request `rid`."""
    return f"{rid}-{index:03d}"


def is_choice_id(rid: str) -> bool:
    """True if `choice_id` may have made it; SGLang's own ids have no hyphen."""
    return rid[-4:-3] == "-"


_numbers = itertools.count()


@dataclass(slots=True, eq=False)
class LiveChoice:
    """One choice in generation. `prior` are the ids that its answer began with, in another process.

    `replica` is the one that generates it, also after a restart; with None the engine chooses.
    """

    rid: str
    request: Any
    sink: ChoiceSink
    tally: InitVar[TokenTally]
    prior: Sequence[int] = ()
    replica: int | None = None
    number: int = field(init=False, default_factory=_numbers.__next__)
    """Choices are in the order of these."""
    ids: array[int] = field(init=False, default_factory=lambda: array("I"))
    """Token ids that the sink has taken; `tally` counts them."""
    num_chars: int = field(init=False, default=0)
    """Characters that the sink has taken."""
    aborted: bool = field(init=False, default=False)
    _num_losses: int = field(init=False, default=0)
    _lost_at_ids: int = field(init=False, default=0)
    _shortfall: Callable[[], ServingError] | None = field(init=False, default=None)

    def __post_init__(self, tally: TokenTally) -> None:
        tally.count(self.ids)

    @property
    def request_id(self) -> str:
        """The id of its request; the choices of one share it."""
        return self.rid.rpartition("-")[0]

    @property
    def num_tokens(self) -> int:
        """Tokens that an engine has to read before it generates the next."""
        return len(self.request.input_ids) + len(self.known_ids)

    @property
    def made_progress(self) -> bool:
        """True if it has `PROGRESS_TOKENS` more than when its last engine was lost."""
        return len(self.ids) >= self._lost_at_ids + PROGRESS_TOKENS

    @property
    def is_suspect(self) -> bool:
        """True if engines were lost with it in a row, without progress in between."""
        return self._num_losses > 1

    @property
    def known_ids(self) -> Sequence[int]:
        """The ids that an engine continues behind."""
        return self.ids or self.prior

    @property
    def max_tokens(self) -> int:
        """The longest answer that was granted, in tokens."""
        return int(self.request.sampling_params.max_new_tokens)

    def lose_engine(self) -> None:
        """Note that the engine that had it was lost."""
        self._num_losses = 1 if self.made_progress else self._num_losses + 1
        self._lost_at_ids = len(self.known_ids)

    def expect_cut(self, error: Callable[[], ServingError]) -> None:
        """Make it end with an error where an engine stops it before `max_tokens`, for lack of KV memory."""
        self._shortfall = error

    def take(self, text: str, token_ids: Sequence[int], finish: Finish, counts: Counts, step: Step) -> None:
        """Hand a step over; the hand-over does the same in place for all but the last."""
        self.ids.extend(token_ids)
        self.num_chars += len(text)
        is_cut = finish is not None and self._shortfall is not None and finish["type"] == "length"
        is_cut = is_cut and counts.completion_tokens < self.max_tokens
        self.sink.take(text, token_ids, None if is_cut else finish, counts, *step)
        if is_cut and self._shortfall is not None:
            self.sink.fail(self._shortfall())

    def abort(self) -> None:
        """Mark the choice as aborted; its engine still has to end it."""
        self.aborted = True

    def end_refused(self, finish: dict[str, Any]) -> None:
        """End it without a step; SGLang also refuses a choice that is aborted while its grammar compiles."""
        self.sink.take("", (), ABORTED if self.aborted else finish, self.sink.counts, *NO_STEP)


class LiveChoices:
    """All choices, in one of three states; each is in one table, by its id."""

    def __init__(self) -> None:
        self.running: dict[str, LiveChoice] = {}
        """Sent, and handed over as the engine generates them."""
        self.replaying: dict[str, Replay] = {}
        """Sent to continue, and not yet handed over again as far as their sinks are."""
        self.waiting: dict[str, LiveChoice] = {}
        """Not sent to the present engine, or the next one."""

    def __len__(self) -> int:
        return len(self.running) + len(self.replaying) + len(self.waiting)

    def wait(self, choice: LiveChoice) -> None:
        """Admit a choice that cannot be sent yet."""
        self.waiting[choice.rid] = choice

    def has(self, rid: str) -> bool:
        """True if a choice has not ended."""
        return rid in self.running or rid in self.replaying or rid in self.waiting

    def pop(self, rid: str) -> LiveChoice | None:
        """Take a choice out that the engine has; None if there is none."""
        replay = self.replaying.pop(rid, None)
        return self.running.pop(rid, None) if replay is None else replay.choice

    def pop_all(self) -> list[LiveChoice]:
        """Take all choices out, in their order."""
        choices = [*self._sent(), *self.waiting.values()]
        for table in (self.running, self.replaying, self.waiting):
            table.clear()
        return sorted(choices, key=lambda choice: choice.number)

    def _sent(self) -> list[LiveChoice]:
        return [*self.running.values(), *(replay.choice for replay in self.replaying.values())]

    def abort(self, prefix: str) -> None:
        """Note that the choices of a request are aborted; those without an engine end now."""
        for rid in [rid for rid in self.waiting if rid.startswith(prefix)]:
            self.waiting.pop(rid).end_refused(ABORTED)
        for choice in self._sent():
            if choice.rid.startswith(prefix):
                choice.abort()

    def lose_engine(self) -> list[LiveChoice]:
        """Have all choices wait, in their order, as their engine has gone; returns them. Aborted ones end."""
        unsent = set(self.waiting)
        for choice in self.pop_all():
            if choice.aborted:
                choice.end_refused(ABORTED)
                continue
            if choice.rid not in unsent:
                choice.lose_engine()
            self.waiting[choice.rid] = choice
        return list(self.waiting.values())

    def fail_all(self, error: Callable[[], ServingError]) -> None:
        """End every choice with an error."""
        for choice in self.pop_all():
            choice.sink.fail(error())


class OutputMismatch(Exception):  # an event of the engine, no error of this program
    """The engine's output for a choice does not agree with its output before."""


class Replay:
    """The beginning of a choice whose engine was asked to continue it; for the first step, mostly."""

    def __init__(self, choice: LiveChoice) -> None:
        self.choice = choice
        self._awaited = choice.known_ids
        self._drop_chars = choice.num_chars
        self._first = choice.sink.counts if choice.ids else None

    @property
    def done(self) -> bool:
        """True if all that the sink has was handed over again."""
        return not self._awaited and not self._drop_chars

    def take(self, text: str, token_ids: Sequence[int], finish: Finish, counts: Counts, step: Step) -> None:
        """Take a step's output. Raises OutputMismatch."""
        choice, awaited = self.choice, self._awaited
        if awaited:
            if list(token_ids[: len(awaited)]) != list(awaited):
                raise OutputMismatch("other token ids than before")
            token_ids, self._awaited = token_ids[len(awaited) :], ()
            if not choice.ids:  # a new sink has a step of what was generated before, which has no logprobs
                reasoning = min(counts.reasoning_tokens, len(awaited))
                earlier = counts._replace(completion_tokens=len(awaited), reasoning_tokens=reasoning)
                choice.take(text, awaited, None, earlier, NO_STEP)
                text = ""
        num_ids = len(choice.ids) + len(token_ids)
        if num_ids != counts.completion_tokens:
            raise OutputMismatch(f"{num_ids} token ids, and a count of {counts.completion_tokens}")
        dropped = min(self._drop_chars, len(text))
        self._drop_chars -= dropped
        if self._first is not None:
            prompt_tokens, _, cached_tokens, _ = self._first
            counts = counts._replace(prompt_tokens=prompt_tokens, cached_tokens=cached_tokens)
        choice.take(text[dropped:], token_ids, finish, counts, step)
