"""What a prompt screen reads of a conversation: which texts, how much each weighs, and their slices.

The newest turn counts in full, and so do the last three joined: a request split over turns shows only
then. What is older fades with every turn since; what is no user's, descriptions of tools among it, counts as
a turn before. Past answers are not read (the stream screen did), but for one that the model is to go on with.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

JOINED_TURNS = 3
DECAY = 0.8
"""By how much an earlier turn's score fades with each turn since."""
MAX_AGE = 10
"""Turns back; an older one has faded to a tenth, and could reach no threshold."""
SLICE_CHARS = 2_000
OVERLAP_CHARS = 200
"""So that a sentence that one slice cuts is whole in the next."""

Message = Mapping[str, Any]


class Read(NamedTuple):
    """A text to score, and what its scores are multiplied with."""

    text: str
    weight: float = 1.0


class Turns(NamedTuple):
    """What there is to read: the newest turns, and those before."""

    newest: list[Read]
    earlier: list[Read]
    """The youngest first."""


def text_of(content: object) -> str:
    """The text of a message's `content`: a string, or its text parts; what is no text is left out."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        return ""
    parts = (part.get("text") for part in content if isinstance(part, Mapping))
    return "\n".join(part for part in parts if isinstance(part, str))


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """The messages of a request, after what its tools and its format say to the model: their descriptions."""
    described = [value for value in (body.get("tools"), body.get("response_format")) if value]
    said = "\n".join(_descriptions(described)) if described else ""
    first: list[Message] = [{"role": "system", "content": said}] if said else []
    return [*first, *body["messages"]]


def turns_of(messages: Sequence[Message]) -> Turns:
    """What is to be read of the messages that the model will see, oldest first."""
    users: list[str] = []
    others: list[Read] = []
    for message in messages:
        text = text_of(message.get("content"))
        if not text.strip():
            continue
        role = message.get("role")
        if role == "user":
            users.append(text)
        elif role != "assistant" or message is messages[-1]:
            others.append(Read(text, DECAY if role != "assistant" else 1.0))
    newest = [Read(text) for text in users[-1:]]
    if len(users) > 1:
        newest.append(Read("\n".join(users[-JOINED_TURNS:])))
    before = users[-1 - MAX_AGE : -1]
    faded = [Read(text, DECAY**age) for age, text in enumerate(reversed(before), start=1)]
    return Turns(newest, others + faded)


def slices(text: str) -> list[str]:
    """The text in pieces that overlap; all of it is in one or another."""
    return list(_slices(text))


def _descriptions(values: list[Any]) -> Iterator[str]:
    """Every text that stands under `description`, however deep."""
    while values:
        value = values.pop()
        if isinstance(value, Mapping):
            description = value.get("description")
            if isinstance(description, str):
                yield description
            values.extend(value.values())
        elif isinstance(value, list):
            values.extend(reversed(value))


def _slices(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > SLICE_CHARS:
        end = start + SLICE_CHARS
        space = text.rfind(" ", end - OVERLAP_CHARS // 2, end)
        end = end if space < 0 else space
        yield text[start:end]
        start = end - OVERLAP_CHARS
    yield text[start:]
