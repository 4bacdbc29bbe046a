"""What a prompt screen reads of a request: which texts, how much each weighs, and their slices.

    who says it                            refused                          watched
    newest user's turn, last three joined  as it is                         as it is
    earlier user's turn, not judged yet    as it is                         as it is
    the same, judged by this server        fading with each turn since      fading
    instructions, short: system, tools…    as it is                         as it is
    the same, long; a tool's result        at 0.8                           where a user's would be refused
    answer, released by this server        not read                         not read
    answer of anyone else, short           at 0.8                           where a user's would be refused
    the same, long                         never                            where a user's would be refused

A request split over turns shows only in the joined ones. A long text has more places to be mistaken in: as
users' turns a sixth of public agent prompts would be refused, and one in eleven benign answers. An answer
that the model is to go on with is read as a user's turn.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from app.safety.text.strings import fields_of, message_text, request_text, text_of

__all__ = ["Message", "Read", "Turns", "conversation_of", "read_request", "slices", "text_of", "turns_of"]

JOINED_TURNS = 3
DECAY = 0.8
"""By how much an earlier turn's score fades with each turn since."""
MAX_AGE = 10
"""Turns back that are read: the score of an older turn has faded to a tenth and reaches no threshold."""
SHORT_CHARS = 300
"""Characters of a short text. A longer text that no user wrote needs stronger evidence to be refused."""
SLICE_CHARS = 2_000
OVERLAP_CHARS = 200
"""Characters that two slices share, so that a sentence cut by one slice is whole in the next."""

Message = Mapping[str, Any]


class Knows(Protocol):
    """What this server has judged before (app.safety.screens.remembered.JudgedTexts)."""

    def is_passed(self, turn: str) -> bool:
        """Whether a user's turn was judged and let pass."""
        ...

    def is_answer(self, field: str) -> bool:
        """Whether a field of an answer was released, or read before."""
        ...


class Read(NamedTuple):
    """A text to score, and what its scores are multiplied with.

    With `watch` the prompt is watched, too, where the text would be refused in a user's turn.
    """

    text: str
    weight: float = 1.0
    watch: bool = False


class Turns(NamedTuple):
    """The texts to read: the newest turns, and all other texts."""

    newest: list[Read]
    earlier: list[Read]
    """What is no user's in order, and then users' turns, the youngest first."""
    users: Sequence[str] = ()
    """The users' turns that were not judged before."""
    answers: Sequence[str] = ()
    """The fields of answers that were not."""
    recent: Sequence[str] = ()
    """The newest users' turns, as many as are joined, oldest first."""


def turns_of(messages: Sequence[Message]) -> Turns:
    """What is to be read of messages alone, of which none was judged before."""
    return read_request({"messages": messages})


def read_request(body: Mapping[str, Any], judged: Knows | None = None, stored: Sequence[bool] = ()) -> Turns:
    """What is to be read of a request, its messages oldest first.

    `stored` are the first of the messages, which are from the store and so were judged before: whether each
    is an answer of this server.
    """
    messages: Sequence[Message] = body["messages"]
    users: list[tuple[str, bool]] = []
    others = [_instructions(beside)] if (beside := request_text(body)) else []
    answers: list[str] = []
    last = len(messages) - 1
    for number, message in enumerate(messages):
        role = message.get("role")
        in_store = number < len(stored)
        if role == "assistant" and number < last:
            fresh = [] if in_store and stored[number] else _unreleased(message, judged)
            answers += fresh
            if fresh:
                others.append(_answer("\n".join(fresh)))
            continue
        text = message_text(message)
        if not text.strip():
            continue
        if role == "user":
            users.append((text, in_store or (number < last and _is_passed(text, judged))))
        elif role == "assistant":
            others.append(Read(text))
        elif role == "tool":
            others.append(Read(text, DECAY, watch=True))
        else:
            others.append(_instructions(text))
    fresh_users = [text for text, is_judged in users if not is_judged]
    recent = [text for text, _ in users[-JOINED_TURNS:]]
    return Turns(_newest(users), others + _before(users), fresh_users, answers, recent)


def conversation_of(
    body: Mapping[str, Any], judged: Knows | None = None, stored: Sequence[bool] = ()
) -> list[dict[str, str]]:
    """The conversation as a guard model is shown it: what nobody has judged yet is in the last user's turn.

    A guard judges the last turn and knows users and answers only, some not even what was before: whatever
    else there is to read in a request would be hidden from it.
    """
    messages: Sequence[Message] = body["messages"]
    asks = max((i for i, message in enumerate(messages) if message.get("role") != "assistant"), default=-1)
    fresh = [beside] if (beside := request_text(body)) else []
    shown: list[dict[str, str]] = []
    if asks < 0:
        return [{"role": "user", "content": "\n\n".join([*fresh, *map(message_text, messages)])}]
    for number, message in enumerate(messages):
        text, by_model = message_text(message), message.get("role") == "assistant"
        if number < len(stored):
            is_judged = stored[number] if by_model else True
        elif by_model:
            is_judged = number > asks or not _unreleased(message, judged)
        else:
            is_judged = message.get("role") == "user" and _is_passed(text, judged)
        if number == asks:
            shown.append({"role": "user", "content": "\n\n".join([*fresh, text])})
        elif is_judged:
            shown.append({"role": "assistant" if by_model else "user", "content": text})
        else:
            fresh.append(text)
    return shown


def slices(text: str) -> list[str]:
    """The whole text in slices of `SLICE_CHARS` characters, which overlap."""
    return list(_slices(text))


def _newest(users: Sequence[tuple[str, bool]]) -> list[Read]:
    newest = [Read(text) for text, _ in users[-1:]]
    if len(users) > 1:
        newest.append(Read("\n".join(text for text, _ in users[-JOINED_TURNS:])))
    return newest


def _before(users: Sequence[tuple[str, bool]]) -> list[Read]:
    """The users' turns before the newest, the youngest first."""
    earlier: list[Read] = []
    for age, (text, is_judged) in enumerate(reversed(users[:-1]), start=1):
        if not is_judged:
            earlier.append(Read(text))
        elif age <= MAX_AGE:
            earlier.append(Read(text, DECAY**age))
    return earlier


def _instructions(text: str) -> Read:
    return Read(text) if len(text) <= SHORT_CHARS else Read(text, DECAY, watch=True)


def _answer(text: str) -> Read:
    return Read(text, DECAY if len(text) <= SHORT_CHARS else 0.0, watch=True)


def _is_passed(text: str, judged: Knows | None) -> bool:
    return judged is not None and judged.is_passed(text)


def _unreleased(message: Message, judged: Knows | None) -> list[str]:
    """The fields of an answer that this server does not know for its own."""
    return [field for field in fields_of(message) if judged is None or not judged.is_answer(field)]


def _slices(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > SLICE_CHARS:
        end = start + SLICE_CHARS
        space = text.rfind(" ", end - OVERLAP_CHARS // 2, end)
        end = end if space < 0 else space
        yield text[start:end]
        start = end - OVERLAP_CHARS
    yield text[start:]
