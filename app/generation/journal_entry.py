"""One request's line in the journal: what is known of it while it runs, and how it is stored."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import orjson

from app.core import ChatRequest, Counts, Delta, Prompt
from app.generation.history import Asked
from app.store.conversations import FinishedAnswer, Status
from app.store.ledger import Price, Terms, Usage
from app.stream.token_stream import SHUTDOWN, STORAGE, TokenStream, first_of
from app.stream.transcript import ChoiceMessage


class Ids(NamedTuple):
    """An answer's token ids as they are stored; see `FinishedAnswer`. Empty: the next turn renders it."""

    answer: bytes = b""
    prompt: bytes = b""
    base_seq: int | None = None


class Entry:
    """One request's line in the journal."""

    def __init__(
        self, asked: Asked, prompt: Prompt, stream: TokenStream, counts: Mapping[int, Counts]
    ) -> None:
        self.stream = stream
        self.turn = asked.turn
        self.outcome = "abort"
        self.blocked = False
        """Whether a screen refused the prompt or halted the answer."""
        self.discarded_tokens = 0
        """Generated in an attempt that was given up, before anything was released; see `begin_anew`."""
        self.emitted_tokens = 0
        """Token ids that the engine handed over; see Engine.emitted_tokens."""
        self.read_whole = False
        """Whether the generation was read to its end."""
        self.price = Price()
        self.terms: Terms | None = None
        self.ended_by_itself = False
        """Whether no choice was stopped from outside."""
        self.saved_id = 0
        self.checkpointed = False
        """Whether the store may have events of it already."""
        self.settled = False
        self.request_seq: int | None = None
        """The reservation's row, once it is committed."""
        self.reserved: asyncio.Future[int] | None = None
        self.hurry: Callable[[], None] = lambda: None
        """Have a reservation that still waits to be committed with others committed now."""
        self._counts = counts
        self._released: dict[int, Counts] = {}
        self._answer_ids: dict[int, array[int]] = {}
        self._prompt_ids: bytes | None = None
        self._base_seq: int | None = None
        if asked.turn is not None:
            taken = prompt.past_runs
            shared = sum(len(run) for run in asked.request.past[:taken])
            self._prompt_ids = _packed(prompt.token_ids[shared:])
            self._base_seq = asked.runs[taken - 1] if taken else None
            self._answer_ids = {choice: array("I") for choice in range(asked.request.n)}

    async def committed(self) -> None:
        """Wait until the reservation is committed. Raises StorageUnavailable, NotFound."""
        if self.request_seq is not None:
            return
        assert self.reserved is not None
        self.hurry()
        self.request_seq = await asyncio.shield(self.reserved)

    def begin_anew(self, counts: dict[int, Counts]) -> None:
        """Give up what was generated so far: nothing of it was released."""
        self.discarded_tokens += sum(c.completion_tokens for c in counts.values())
        counts.clear()

    def released(self, delta: Delta) -> None:
        """Take note of what goes out, and keep the ids of an answer that is stored."""
        self._released[delta.choice] = delta.counts
        if self._answer_ids:
            self._answer_ids[delta.choice].extend(delta.token_ids)

    def released_counts(self, choice: int) -> Counts:
        """The counts of a choice as far as it was released."""
        known = self._released.get(choice)
        if known is not None:
            return known
        return first_of(self._counts)._replace(completion_tokens=0, reasoning_tokens=0)

    def status(self) -> Status:
        """What the turn's answers have come to; one that ended by itself is whole, whoever left meanwhile."""
        if self.blocked:
            return "blocked"
        if self.ended_by_itself:
            return "complete"
        cancelled = self.stream.cancelled
        if cancelled in (SHUTDOWN, STORAGE):
            return "interrupted"
        if cancelled is not None:
            return "cancelled"
        return "failed"

    def usage(self) -> Usage:
        """The counts so far, over all choices; the prompt counts once.

        What is held back counts as withheld until it is released; reasoning, once it is.
        """
        first = first_of(self._counts)
        completion_tokens = sum(c.completion_tokens for c in self._counts.values()) + self.discarded_tokens
        released_tokens = sum(c.completion_tokens for c in self._released.values())
        return Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=first.cached_tokens,
            reasoning_tokens=sum(c.reasoning_tokens for c in self._released.values()),
            withheld_tokens=max(completion_tokens - released_tokens, 0),
        )

    def finished(self, said: Mapping[int, ChoiceMessage], status: Status) -> list[FinishedAnswer]:
        """The turn's answers as they are stored."""
        if self.turn is None:
            return []
        return [
            finished_answer(answer_id, said.get(choice, ChoiceMessage()), status, self._ids(choice))
            for choice, answer_id in enumerate(self.turn.answer_ids)
        ]

    def _ids(self, choice: int) -> Ids:
        if self._prompt_ids is None or self.blocked:  # no later turn begins with these
            return Ids()
        return Ids(self._answer_ids[choice].tobytes(), self._prompt_ids, self._base_seq)


def finished_answer(
    answer_id: str,
    answer: ChoiceMessage,
    status: Status,
    ids: Ids,
) -> FinishedAnswer:
    """An answer as it is stored: its text, and its whole message where it is more than text."""
    message = answer.message
    body = orjson.dumps(message) if message.keys() - {"role", "content"} else None
    return FinishedAnswer(
        id=answer_id,
        text=message.get("content") or "",
        body=body,
        status=status,
        finish_reason=answer.finish_reason,
        answer_ids=ids.answer,
        prompt_ids=ids.prompt,
        base_seq=ids.base_seq,
    )


def stream_facts(request: ChatRequest) -> bytes:
    """What it takes to write the stream's frames again."""
    return orjson.dumps(
        {
            "n": request.n,
            "include_usage": request.include_usage,
            "continuous_usage": request.continuous_usage,
            "logprobs": request.logprobs,
            "created_at_unix_s": request.created_at_unix_s,
            "conversation_id": request.conversation_id,
            "message_id": request.message_id,
        }
    )


def _packed(token_ids: Sequence[int]) -> bytes | None:
    """Ids as little-endian uint32; None where a model has others, as placeholders of images are."""
    try:
        return array("I", token_ids).tobytes()
    except OverflowError:
        return None
