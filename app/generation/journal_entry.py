"""One request's entry in the journal: its state while it runs, and the rows that are stored of it."""

from __future__ import annotations

import asyncio
import enum
from array import array
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import orjson

from app.core import ChatRequest, Counts, Delta, Prompt, Usage
from app.errors import Interrupted
from app.generation.history import LoadedTurn
from app.generation.progress import Progress
from app.store.conversations import FinishedAnswer, Status
from app.store.ledger import Terms
from app.stream.token_stream import SHUTDOWN, STORAGE, SUSPENDED, TokenStream, first_of
from app.stream.transcript import ChoiceMessage


class Ids(NamedTuple):
    """An answer's token ids as they are stored; see `FinishedAnswer`. Empty: the next turn renders it."""

    answer: bytes = b""
    prompt: bytes = b""
    base_seq: int | None = None


class Outcome(enum.Enum):
    """How a generation ended."""

    DONE = "done"
    """Every choice ended by itself."""
    HALTED = "halted"
    """A screen refused the prompt or halted the answer."""
    BUDGET = "budget"
    """The key's tokens or its month's money were used up."""
    CANCELLED = "cancelled"
    """A choice was stopped from outside: by its reader, or because the server stops."""
    FAILED = "failed"
    """The engine, a screen or the store failed; also until another outcome is known."""


class JournalEntry:
    """One request's entry in the journal. `reserved` is done once the reservation's row is committed.

    `need` commits a reservation now that still waits to be committed with others.
    """

    def __init__(
        self,
        turn: LoadedTurn,
        prompt: Prompt,
        stream: TokenStream,
        counts: Mapping[int, Counts],
        *,
        reserved: asyncio.Future[int],
        terms: Terms,
        need: Callable[[], None] = lambda: None,
        key_id: str | None = None,
        progress: Progress = Progress(),  # noqa: B008  # frozen
    ) -> None:
        """`progress` is that of an answer that goes on; its ids come from the engine once more."""
        self.stream = stream
        self.loaded = turn
        self.earlier = progress
        self.turn = turn.stored_turn
        self.key_id = key_id
        self.reserved = reserved
        self.terms = terms
        self.price = terms.price
        self.finish = "abort"
        """What the ledger calls the end: finish reasons, or an error's code."""
        self.outcome = Outcome.FAILED
        self.emitted_tokens = sum(map(len, progress.token_ids))
        """Token ids that engines handed over, each once; see Engine.pop_emitted_tokens."""
        self._earlier_tokens = self.emitted_tokens
        self.read_whole = False
        """Whether the generation was read to its end."""
        self.saved_id = 0
        self.checkpointed = False
        """Whether the store may have events of it already."""
        self.settled = False
        self.request_seq: int | None = None
        """The reservation's row, once it is committed."""
        self._need = need
        self._counts = counts
        self._released: dict[int, Counts] = dict(progress.released)
        ids = progress.token_ids or [()] * turn.request.n
        self._generated = [array("I", run) for run in ids]
        self._to_repeat = {choice: len(run) for choice, run in enumerate(progress.token_ids)}
        """Ids of each choice that the engine has yet to hand over once more."""
        self._prompt_ids: bytes | None = None
        self._base_seq: int | None = None
        if turn.stored_turn is not None:
            num_taken = prompt.past_runs
            shared = sum(len(run) for run in turn.request.past[:num_taken])
            self._prompt_ids = _packed(prompt.token_ids[shared:])
            self._base_seq = turn.run_seqs[num_taken - 1] if num_taken else None

    # Its reservation, checkpoints and settlement: the journal's side

    async def committed(self) -> None:
        """Wait until the reservation is committed. Raises StorageUnavailable, NotFound."""
        if self.request_seq is None:
            self._need()
            self.request_seq = await asyncio.shield(self.reserved)

    def take_reserved(self) -> bool:
        """Take over the row of a reservation that nobody waited for. Returns whether there is one."""
        if self.reserved.cancelled() or self.reserved.exception() is not None:
            return False
        self.request_seq = self.reserved.result()
        return True

    def begin_checkpoint(self) -> None:
        """Note that the store may have events of this request from now on."""
        self.checkpointed = True

    def end_checkpoint(self, last_id: int) -> None:
        """Note that the store has the events up to `last_id`."""
        self.saved_id = last_id

    def finish_as(self, finish: str) -> None:
        """Set the outcome for the ledger. Does nothing after the settlement."""
        if not self.settled:
            self.finish = finish

    def settle(self) -> bool:
        """Note that the settlement is committed. Returns False if that was noted before."""
        was_open, self.settled = not self.settled, True
        return was_open

    # What the generation does

    def generated(self, delta: Delta) -> None:
        """Keep the token ids of a delta, which the engine has made."""
        token_ids, to_repeat = delta.token_ids, self._to_repeat.get(delta.choice, 0)
        if to_repeat:
            num_repeated = min(to_repeat, len(token_ids))
            self._to_repeat[delta.choice] -= num_repeated
            token_ids = token_ids[num_repeated:]
        self._generated[delta.choice].extend(token_ids)

    def released(self, delta: Delta) -> None:
        """Note a released delta."""
        self._released[delta.choice] = delta.counts

    def read_to_end(self) -> None:
        """Note that the engine's last delta has been read."""
        self.read_whole = True

    def add_emitted(self, tokens: int) -> None:
        """Add the number of token ids that the engine handed over, less those that it repeated."""
        repeated_tokens = self._earlier_tokens - sum(self._to_repeat.values())
        self.emitted_tokens += tokens - repeated_tokens

    def end(self, outcome: Outcome) -> None:
        """Note how the generation ended."""
        self.outcome = outcome

    # What is stored

    def released_counts(self, choice: int) -> Counts:
        """The counts of a choice as far as it was released."""
        released = self._released.get(choice)
        if released is not None:
            return released
        return first_of(self._counts)._replace(completion_tokens=0, reasoning_tokens=0)

    def status(self) -> Status:
        """The status of the turn's answers. An answer that ended by itself is complete, whoever left."""
        if self.outcome is Outcome.HALTED:
            return "blocked"
        if self.outcome in (Outcome.DONE, Outcome.BUDGET):
            return "complete"
        cancelled = self.stream.cancelled
        if cancelled in (SHUTDOWN, SUSPENDED, STORAGE) or isinstance(self.stream.error, Interrupted):
            return "interrupted"
        if cancelled is not None:
            return "cancelled"
        return "failed"

    def usage(self) -> Usage:
        """The counts so far, over all choices; the prompt counts once.

        What is held back counts as withheld until it is released; reasoning, once it is.
        """
        first = first_of(self._counts)
        completion_tokens = sum(c.completion_tokens for c in self._counts.values())
        released_tokens = sum(c.completion_tokens for c in self._released.values())
        return Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=first.cached_tokens,
            reasoning_tokens=sum(c.reasoning_tokens for c in self._released.values()),
            withheld_tokens=max(completion_tokens - released_tokens, 0),
        )

    def progress(self) -> Progress:
        """How far the answer has come."""
        return Progress(self._generated, dict(self._counts), dict(self._released))

    def finished(self, answers: Mapping[int, ChoiceMessage], status: Status) -> list[FinishedAnswer]:
        """The turn's answers as they are stored."""
        if self.turn is None:
            return []
        return [
            finished_answer(answer_id, answers.get(choice, ChoiceMessage()), status, self._ids(choice))
            for choice, answer_id in enumerate(self.turn.answer_ids)
        ]

    def _ids(self, choice: int) -> Ids:
        if self._prompt_ids is None or self.outcome is Outcome.HALTED:  # no later turn begins with these
            return Ids()
        num_released = self.released_counts(choice).completion_tokens
        return Ids(self._generated[choice][:num_released].tobytes(), self._prompt_ids, self._base_seq)


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
    """The JSON object from which a replay writes the stream's frames again."""
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
