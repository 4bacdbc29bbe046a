"""The texts of a request that a prompt screen reads, the weight of each, and their slices.

    role                                   refused                          watched
    newest user's message, last three
    turns, and all not judged yet, joined  as it is                         as it is
    earlier user's turn, not judged yet    as it is                         as it is
    the same, judged by this server        fading with each turn since      fading
    instructions, short: system, tools…    as it is                         as it is
    the same, long; a tool's result        at 0.8                           where a user's would be refused
    answer, released by this server        not read                         not read
    answer of anyone else, short           at 0.8                           where a user's would be refused
    the same, long                         never                            where a user's would be refused

Messages of one role in a row are read each for itself and as one text, a user's as one turn: a request split
over them shows only there. A long text has more places to be mistaken in: as
users' turns a sixth of public agent prompts would be refused, and one in eleven benign answers. An answer
that the model is to continue is read as a user's turn.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import attrgetter
from typing import Any, NamedTuple, Protocol

from app.safety.text.strings import fields_of, message_text, request_text, text_of

__all__ = [
    "Message",
    "Read",
    "Turns",
    "conversation_of",
    "read_request",
    "sentences",
    "slices",
    "text_of",
    "turns_of",
]

JOINED_TURNS = 3
DECAY = 0.8
"""By how much an earlier turn's score fades with each turn since."""
MAX_AGE = 10
"""Turns back that are read: the score of an older turn has faded to a tenth and reaches no threshold."""
MAX_UNJUDGED_TAIL = 8
"""Newest unjudged messages, without which those before are read as one text."""
SHORT_CHARS = 300
"""Characters of a short text. A longer text that no user wrote needs stronger evidence to be refused."""
BESIDE_CHARS = 64
"""Characters beside a message's content, such as an id, that do not hide what it says from a classifier."""
EDITED_CHARS = 100_000
"""Characters of the users' newest messages that `Turns.edited` looks at."""
SLICE_CHARS = 2_000
OVERLAP_CHARS = 200
"""Characters that two slices share, so that a sentence cut by one slice is whole in the next."""
SENTENCE_CHARS = 160
"""Characters of a sentence, beyond which it is cut behind a comma or a word. If commas join a request to an
article, 78 of 90 are found with 160 characters and 16 with 240; ordinary texts fare the same."""
FEW_LETTERS = 8
"""A sentence of fewer letters goes with the one before it; one that is not ASCII counts for three."""
_SENTENCE_END = re.compile(
    r"(?<=[.!?\u061f\u2026])[\"')\]\u00bb\u201d\u2019]*\s+|(?<=[\u3002\uff01\uff1f\u0964])|\n+"
)
_CLAUSE_END = re.compile(r"[,;:\u060c\u061b\u3001\uff0c\uff1b\uff1a] ?")

Message = Mapping[str, Any]


class Memory(Protocol):
    """The texts that this server has judged before (app.safety.prompt.remembered.JudgedTexts)."""

    def is_passed(self, turn: str) -> bool:
        """True if a user's turn was judged and passed."""
        ...

    def is_answer(self, field: str) -> bool:
        """True if a field of an answer was released, or read before."""
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
    """The texts of others than users in order, and then users' turns, the youngest first."""
    users: Sequence[str] = ()
    """The users' turns that were not judged before."""
    answers: Sequence[str] = ()
    """The fields of answers that were not."""
    recent: Sequence[str] = ()
    """The newest users' turns, as many as are joined, oldest first."""
    edited: Callable[[Callable[[str], str]], Turns | None] = lambda _edit: None
    """The turns once a function has edited each user's message; None where it changes none."""


def turns_of(messages: Sequence[Message]) -> Turns:
    """The texts to read of messages alone, of which none was judged before."""
    return read_request({"messages": messages})


def read_request(
    body: Mapping[str, Any], judged: Memory | None = None, stored: Sequence[bool | None] = ()
) -> Turns:
    """The texts to read of a request, its messages oldest first.

    `stored` are the first of the messages, which are from the store and so were judged before: whether each
    is an answer of this server. None was imported, and is judged as if the request held it.
    """
    others = [_instructions(beside)] if (beside := request_text(body)) else []
    turns: list[_Turn] = []
    answers: list[str] = []
    instructions: list[list[_Entry]] = []
    for kind, group in groupby(_message_texts(body["messages"], judged, stored), key=attrgetter("kind")):
        run = list(group)
        if kind == "user":
            turns.append(_turn(run, judged))
            continue
        unknown = [message for message in run if message is not _OWN_ANSWER]
        if not unknown:
            continue
        others += (message.read(text) for message in unknown for text in message.texts)
        if len(unknown) > 1:
            others.append(run[-1].read(_joined(unknown)))
        if kind == "instructions":
            instructions.append(run)
        answers += (field for message in unknown if message.read is _answer for field in message.fields)
    if len(instructions) > 1:
        others.append(_instructions(_joined([message for run in instructions for message in run])))
    users = [message for turn in turns for message in turn.messages]
    fresh = [message.text for message in users if not message.is_judged]
    fresh += (turn.text for turn in turns if len(turn.messages) > 1 and not turn.is_judged)
    recent = [message.text for message in users[-JOINED_TURNS:]]
    edited = partial(_edited, body, judged, stored)
    return Turns(_newest(turns, users), others + _before(turns), fresh, answers, recent, edited)


def _edited(
    body: Mapping[str, Any], judged: Memory | None, stored: Sequence[bool | None], edit: Callable[[str], str]
) -> Turns | None:
    """The texts to read once `edit` has changed users' messages; None where it changes none.

    An edited message is unjudged. Messages with other parts than text stay, and so do those before the
    newest EDITED_CHARS, so that no request is searched for long.
    """
    messages, left = list(body["messages"]), EDITED_CHARS
    for number, message in reversed(list(enumerate(messages))):
        text = _plain_text(message)
        left -= len(text)
        if left < 0:
            break
        rest = edit(text)
        if rest != text:
            messages[number] = {**message, "content": rest}
    if all(new is old for new, old in zip(messages, body["messages"], strict=True)):
        return None
    return read_request({**body, "messages": messages}, judged, stored)


def conversation_of(
    body: Mapping[str, Any], judged: Memory | None = None, stored: Sequence[bool | None] = ()
) -> list[dict[str, str]]:
    """The conversation as a guard model is shown it: unjudged text is in the last user's turn.

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
        own = stored[number] if number < len(stored) else None
        if own is not None:
            is_judged = own if by_model else True
        elif by_model:
            is_judged = number > asks or not _unreleased(fields_of(message), judged)
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
    """The whole text in slices of at most `SLICE_CHARS` characters, which overlap."""
    pieces, start = [], 0
    while len(text) - start > SLICE_CHARS:
        end = start + SLICE_CHARS
        space = text.rfind(" ", end - OVERLAP_CHARS // 2, end)
        end = end if space < 0 else space
        pieces.append(text[start:end])
        start = end - OVERLAP_CHARS
    return [*pieces, text[start:]]


def sentences(text: str) -> list[str]:
    """The sentences and lines of a text, each of at most `SENTENCE_CHARS` characters.

    A classifier's score is that of a whole text: behind one harmless paragraph it finds 6 of 150 harmful
    requests, and read by themselves 140.
    """
    parted: list[str] = []
    for line in _SENTENCE_END.split(text):
        rest = line.strip()
        while len(rest) > SENTENCE_CHARS:
            end = _clause_end(rest)
            parted.append(rest[:end])
            rest = rest[end:].strip()
        if parted and _is_short(rest) and len(parted[-1]) + len(rest) < SENTENCE_CHARS:
            parted[-1] = f"{parted[-1]} {rest}".rstrip()
        elif rest:
            parted.append(rest)
    return parted


def _is_short(line: str) -> bool:
    return sum(1 if char.isascii() else 3 for char in line if char.isalnum()) < FEW_LETTERS


def _clause_end(line: str) -> int:
    """Where to cut a long sentence: behind its last comma in reach, else at a space."""
    least = SENTENCE_CHARS // 3
    ends = [clause.end() for clause in _CLAUSE_END.finditer(line, least, SENTENCE_CHARS)]
    space = line.rfind(" ", least, SENTENCE_CHARS)
    return ends[-1] if ends else space if space > 0 else SENTENCE_CHARS


def _plain_text(message: Message) -> str:
    """The text of a user's message, if it is text alone."""
    content = message.get("content")
    parts = content if isinstance(content, list) else []
    has_others = any(not isinstance(piece, Mapping) or piece.get("type") != "text" for piece in parts)
    return text_of(content) if message.get("role") == "user" and not has_others else ""


class _Entry(NamedTuple):
    """The text to read of a message. Those of one kind in a row are one run, and read as one text too."""

    kind: str
    text: str
    read: Callable[[str], Read] = Read
    """Gives a text of this kind its weight."""
    is_judged: bool = False
    is_stored: bool = False
    fields: Sequence[str] = ("",)
    """The fields that make the text; of an answer those that are not known."""

    @property
    def content(self) -> str:
        """The text without names, ids, calls and the like."""
        return self.fields[0]

    @property
    def texts(self) -> Sequence[str]:
        """The text, and its content alone where what is beside it would drown it."""
        is_drowned = len(self.text) - len(self.content) > BESIDE_CHARS
        return (self.text, self.content) if is_drowned else (self.text,)


class _Turn(NamedTuple):
    """A user's messages in a row."""

    messages: Sequence[_Entry]
    text: str
    is_judged: bool
    """They were judged as one text."""


_OWN_ANSWER = _Entry("assistant", "")
"""An answer of this server."""


def _message_texts(
    messages: Sequence[Message], judged: Memory | None, stored: Sequence[bool | None]
) -> Iterator[_Entry]:
    """The texts of messages. Empty ones are left out, as they set nothing apart."""
    last = len(messages) - 1
    for number, message in enumerate(messages):
        role, own = message.get("role"), stored[number] if number < len(stored) else None
        is_stored = own is not None
        if role == "assistant" and number < last:
            if own:
                yield _OWN_ANSWER
            elif fields := fields_of(message):
                fresh = _unreleased(fields, judged)
                yield (_Entry("assistant", "\n".join(fresh), _answer, fields=fresh) if fresh else _OWN_ANSWER)
            continue
        fields = fields_of(message)
        text = "\n".join(fields)
        if not fields:
            continue
        if role == "user":
            is_judged = is_stored or (number < last and _is_passed(text, judged))
            yield _Entry("user", text, Read, is_judged, is_stored, fields)
        elif role == "assistant":  # that the model is to continue
            yield _Entry("assistant", text, fields=fields)
        elif role == "tool":
            yield _Entry("tool", text, partial(Read, weight=DECAY, watch=True), fields=fields)
        else:
            yield _Entry("instructions", text, _instructions, fields=fields)


def _joined(run: Sequence[_Entry]) -> str:
    """The contents alone: hardly a template writes names and ids, which would drown them."""
    return "\n".join(message.content for message in run)


def _turn(run: Sequence[_Entry], judged: Memory | None) -> _Turn:
    if len(run) == 1:
        return _Turn(run, run[0].content, run[0].is_judged)
    text = _joined(run)
    return _Turn(run, text, all(message.is_stored for message in run) or _is_passed(text, judged))


def _newest(turns: Sequence[_Turn], users: Sequence[_Entry]) -> list[Read]:
    """The newest user's message, those in a row with it, the last turns, and all unjudged ones."""
    if not turns:
        return []
    texts = [*users[-1].texts]
    if len(turns[-1].messages) > 1:
        texts.append(turns[-1].text)
    if len(turns) > 1:
        recent = [message for turn in turns[-JOINED_TURNS:] for message in turn.messages]
        texts.append(_joined(recent))
        unknown = [message for message in users if not message.is_judged]
        if not all(message.is_judged for message in users[: -len(recent)]):
            texts.append(_joined(unknown))
        texts += _joined_before(unknown)
    return [Read(text) for text in dict.fromkeys(texts)]


def _joined_before(unknown: Sequence[_Entry]) -> Iterator[str]:
    """Unjudged messages, joined without the last one, without the last two, and so on.

    A few harmless ones behind a split request would drown it, and none was read when it was the newest.
    """
    if sum(len(message.content) for message in unknown) <= SLICE_CHARS:
        for number in range(len(unknown) - 1, max(1, len(unknown) - 1 - MAX_UNJUDGED_TAIL), -1):
            yield _joined(unknown[:number])


def _before(turns: Sequence[_Turn]) -> list[Read]:
    """The users' messages before the newest and their turns, the youngest first."""
    texts: list[tuple[str, int, bool]] = []
    age = 0
    for turn in reversed(turns):
        if len(turn.messages) > 1:
            texts.append((turn.text, age, turn.is_judged))
        for message in reversed(turn.messages):
            texts += ((text, age, message.is_judged) for text in message.texts)
            age += 1
    return [
        Read(text, DECAY**age if is_judged else 1.0)
        for text, age, is_judged in texts
        if age and (age <= MAX_AGE or not is_judged)
    ]


def _instructions(text: str) -> Read:
    return Read(text) if len(text) <= SHORT_CHARS else Read(text, DECAY, watch=True)


def _answer(text: str) -> Read:
    return Read(text, DECAY if len(text) <= SHORT_CHARS else 0.0, watch=True)


def _is_passed(text: str, judged: Memory | None) -> bool:
    return judged is not None and judged.is_passed(text)


def _unreleased(fields: Sequence[str], judged: Memory | None) -> list[str]:
    """The fields of an answer that this server does not know for its own."""
    return [field for field in fields if judged is None or not judged.is_answer(field)]
