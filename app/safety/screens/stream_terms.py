"""What one request's answer is screened by: the policy's rules, two models, and how long tokens wait."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from app.messages import content_texts
from app.safety.screens.span_reader import Begun
from app.safety.text.hard_list import HardList
from app.safety.verdict import Scores, Verdict


class HoldBack(NamedTuple):
    """How many tokens are held back while the model is in no doubt, and up to how many more if it is.

    The same of watched prompts, whose answers are examined for the first time after `watched` tokens.
    """

    clean: int = 0
    grey: int = 80
    watched: int = 12
    watched_grey: int = 160


class Listener(Protocol):
    """A text that is scored while it grows (app.safety.classifiers.output_model)."""

    def feed(self, text: str) -> float:
        """How harmful the text is now that this has come: the maximum of its scores."""
        ...

    def scores(self) -> Scores:
        """The scores as of now."""
        ...


class Listens(Protocol):
    """A model of answers."""

    suspect_at: float | None
    """The score at which an answer is to be examined; None where the policy's thresholds hold for it."""

    def listen(self, prior: float) -> Listener:
        """A new text, to a prompt of this harm."""
        ...


class Suspicion(NamedTuple):
    """What is to be examined before more of a choice goes out.

    This is the end of its text, with the harm of its prompt, the harm that was heard in all of the text, and
    how the text opens.
    """

    text: str
    prior: float
    heard: float = 0.0
    opening: str = ""


Examine = Callable[[Suspicion, str], Awaitable[Scores]]
"""The scores of the slower model for an owner's answer (app.safety.screens.answer_examiner).

Raises ScreenFailed.
"""


class Rules(Protocol):
    """A policy in force, as answers meet it (app.safety.policies.policy.Policy)."""

    hard_list: Sequence[str]
    answer_record_floor: float
    """The least harm of an answer that is to be recorded."""

    def output_thresholds(self, *, watched: bool) -> Sequence[float]:
        """The scores at which categories halt an answer."""
        ...

    def clear_output(self, harm: float, *, watched: bool) -> Verdict | None:
        """The verdict on an answer of this harm, where no category can do anything; None where one may."""
        ...

    def judge_output(self, scores: Scores, *, watched: bool) -> Verdict:
        """What becomes of an answer with these scores."""
        ...

    def halted(self, *, lag_tokens: int = 0) -> Verdict:
        """The verdict on an answer that has a span of the hard list."""
        ...


class Steering(NamedTuple):
    """What a request says of where its answer begins and ends (`steering_of`)."""

    last_said: str = ""
    """The end of the last assistant message: a client reads the answer after it."""
    continues: bool = False
    """Whether the answer goes on with that message itself."""
    steered: bool = False
    """Whether parameters may force an end that looks like the model's own."""
    stop_ids: frozenset[int] = frozenset()


UNSTEERED = Steering()
_LAST_SAID_CHARS = 65_536
_FORCING = ("regex", "ebnf", "structural_tag", "logit_bias", "min_tokens", "custom_logit_processor")


def steering_of(
    body: Mapping[str, Any], messages: Sequence[Mapping[str, Any]], *, is_raw: bool = False
) -> Steering:
    """Read it off a request's body, and off the messages that the model sees.

    An answer goes on with a prompt that has no template (`is_raw`), as with an assistant's message.
    """
    answers = (message for message in reversed(messages) if is_raw or message.get("role") == "assistant")
    answer = next(answers, None)
    answer_format = body.get("response_format")
    kind = answer_format.get("type") if isinstance(answer_format, Mapping) else None
    tool_choice = body.get("tool_choice")
    return Steering(
        "" if answer is None else "".join(content_texts(answer.get("content")))[-_LAST_SAID_CHARS:],
        answer is not None and answer is messages[-1],
        any(body.get(name) for name in _FORCING)
        or kind not in (None, "text", "json_object")
        or tool_choice == "required"
        or isinstance(tool_choice, Mapping),
        frozenset(body.get("stop_token_ids") or ()),
    )


@dataclass(frozen=True, slots=True)
class Terms:
    """What all choices of a request are screened by; `clean` and `grey` are its hold-back.

    A harm of `floor` may halt, one of `doubt` is the first of which the model is in doubt; both are of the
    categories `acting`, which are all where it is None. One of `record_floor` is recorded. `begun` is how far
    the hard list is, and `continues` the text, that the answer goes on from; the rest see Steering.
    If answers are `examined`, a harm of `floor` has an answer examined, and what that finds may halt it.
    """

    model: Listens | None
    hard_list: HardList | None
    begun: Begun
    continues: str
    steered: bool
    stop_ids: frozenset[int]
    policy: Rules
    prior: float
    watched: bool
    floor: float
    doubt: float
    acting: Collection[str] | None
    record_floor: float
    examined: bool
    examine_end: bool
    """Whether an answer is examined at its end in any case, as its scores are asked for."""
    clean: int
    grey: int
    held_s: Callable[[float], None]
    clock_s: Callable[[], float]
