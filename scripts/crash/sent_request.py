"""One request and all that its client knows of it."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from app.engine.scripted.engine import scripted_text
from scripts.crash.http import Event

DONE = "[DONE]"


class Mark(NamedTuple):
    """What had been received with event `id`: tokens, and characters of text by choice."""

    id: int
    at_s: float
    tokens: int
    lengths: dict[int, int]


class WireViolation(Exception):
    """A stream is not what OpenAI's clients can read, or contradicts itself."""


@dataclass
class Reply:
    """What a client has understood of a stream, over any number of connections.

    `counted` streams say in each chunk how many tokens there are; others have scripted tokens.
    """

    counted: bool = False
    request_id: str | None = None
    last_id: int = 0
    text: dict[int, str] = field(default_factory=dict)
    tokens: int = 0
    finish_reasons: dict[int, str] = field(default_factory=dict)
    usage: dict[str, Any] | None = None
    error: dict[str, Any] | None = None
    error_id: int | None = None
    done: bool = False
    marks: list[Mark] = field(default_factory=list)

    def add(self, event: Event, at_s: float) -> None:
        """Take in an event. Raises WireViolation."""
        if self.done:
            raise WireViolation(f"an event after [DONE]: {event}")
        if event.id is None or event.id <= self.last_id:
            raise WireViolation(f"event {event.id} after {self.last_id}")
        self.last_id = event.id
        if event.data == DONE:
            self.done = True
        else:
            self._add_chunk(json.loads(event.data))
        self.marks.append(Mark(event.id, at_s, self.tokens, {c: len(t) for c, t in self.text.items()}))

    def _add_chunk(self, chunk: dict[str, Any]) -> None:
        if self.error is not None:
            raise WireViolation(f"a chunk after the error: {chunk}")
        if "error" in chunk:
            self.error, self.error_id = chunk["error"], self.last_id
            return
        self.request_id = self.request_id or chunk["id"]
        if chunk["id"] != self.request_id:
            raise WireViolation(f"a chunk of another stream: {chunk}")
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self.add_choice(choice["index"], choice["delta"].get("content") or "", choice["finish_reason"])
        if self.counted and chunk.get("usage"):
            self.tokens = chunk["usage"]["completion_tokens"]

    def add_choice(self, choice: int, text: str, finish_reason: str | None) -> None:
        """Take in text of a choice; each scripted token ends in the only space it has."""
        self.text[choice] = self.text.get(choice, "") + text
        if not self.counted:
            self.tokens += text.count(" ")
        if finish_reason is not None:
            if choice in self.finish_reasons:
                raise WireViolation(f"choice {choice} ended twice")
            self.finish_reasons[choice] = finish_reason

    def text_until(self, after: int) -> dict[int, str]:
        """The text received up to event `after`."""
        mark = next((mark for mark in self.marks if mark.id == after), Mark(0, 0.0, 0, {}))
        return {choice: self.text[choice][:length] for choice, length in mark.lengths.items()}


@dataclass(eq=False)
class SentRequest:
    """A request as it was sent, and what came of it for its client."""

    number: int
    path: str
    body: dict[str, Any]
    stored: bool
    length: int
    """Tokens of each choice of the whole answer."""
    scripted: bool
    key: str | None = None
    continues: str | None = None
    """The conversation whose next turn this is."""
    sent_at_s: float = 0.0
    status: int | None = None
    request_id: str | None = None
    conversation_id: str | None = None
    refused: str | None = None
    left: bool = False
    """Whether its client did not stay to the end."""
    cancelled: bool = False
    violation: str | None = None
    repeats: SentRequest | None = None
    """The earlier request whose Idempotency-Key and body these are."""
    reply: Reply = field(default_factory=Reply)
    life: Any = None
    """The life of the server in which it was sent."""

    @property
    def n(self) -> int:
        n: int = self.body.get("n", 1)
        return n

    @property
    def tag(self) -> str:
        """What its message begins with, to know it again in the store."""
        return tag(self.number)

    @property
    def prompt_words(self) -> int:
        return len(self.body["messages"][-1]["content"].split())

    @property
    def finish_reason(self) -> str:
        """How the whole answer ends."""
        return "length" if self.length == self.body["max_tokens"] else "stop"

    @cached_property
    def _full(self) -> dict[int, str]:
        pieces = {c: scripted_text(self.body["seed"], c, self.length) for c in range(self.n)}
        return {choice: "".join(tokens) for choice, tokens in pieces.items()}

    def is_beginning(self, text: dict[int, str]) -> bool:
        """Whether this is how the answer begins: as scripted, or as its client received it."""
        if self.scripted:
            return all(self._full[choice].startswith(beginning) for choice, beginning in text.items())
        reply = self.reply.text
        return all(
            beginning.startswith(reply.get(choice, "")) or reply[choice].startswith(beginning)
            for choice, beginning in text.items()
        )

    def is_whole(self, text: dict[int, str]) -> bool:
        """Whether this is the whole answer, as far as it can be known from outside."""
        return text == self._full if self.scripted else self.is_beginning(text)


def tag(number: int) -> str:
    """The first word of request `number`'s message."""
    return f"request-{number:06d}"
