"""One request's entry in the journal: its state while it runs, and the rows that are stored of it."""

from __future__ import annotations

import asyncio
import enum
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import orjson

from app.core import Counts, Delta, Prompt, Usage
from app.errors import Interrupted
from app.journal.history import LoadedTurn
from app.store.checkpoints import Checkpoint
from app.store.conversations import FinishedAnswer, Status
from app.store.ledger import BillingTerms
from app.stream.token_stream import SHUTDOWN, STORAGE, SUSPENDED, TokenStream, first_of
from app.stream.transcript import ChoiceMessage

Ids = tuple[bytes, bytes, int | None]
"""An answer's token ids as they are stored: the last three fields of `FinishedAnswer`."""
NO_IDS: Ids = (b"", b"", None)
"""No ids: the next turn renders the answer."""


class Outcome(enum.Enum):
    """The end of a generation, as `EngineRun.end` (app.pipeline.engine_run) decides it."""

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


@dataclass(frozen=True, slots=True)
class Progress:
    """The state of each choice of an answer that was suspended. Empty for a new answer."""

    token_ids: Sequence[Sequence[int]] = ()
    """Token ids that were generated, one run for each choice."""
    counts: Mapping[int, Counts] = field(default_factory=dict)
    """The counts of what was generated, as billed."""
    released: Mapping[int, Counts] = field(default_factory=dict)
    """The counts of what was released."""

    def with_earlier_prompt(self, delta: Delta) -> Delta:
        """The delta with the prompt's counts as they were: computing it again costs its caller nothing."""
        earlier = self.counts.get(delta.choice)
        if earlier is None:
            return delta
        counts = delta.counts._replace(
            prompt_tokens=earlier.prompt_tokens, cached_tokens=earlier.cached_tokens
        )
        return delta._replace(counts=counts)

    def is_reached(self, delta: Delta) -> bool:
        """True if a delta's counts are at least those that its choice had."""
        earlier = self.counts.get(delta.choice)
        return earlier is None or delta.counts.completion_tokens >= earlier.completion_tokens


class JournalEntry:
    """One request's entry in the journal. `reserved` is done once the reservation's row is committed."""

    def __init__(
        self,
        turn: LoadedTurn,
        prompt: Prompt,
        stream: TokenStream,
        counts: Mapping[int, Counts],
        *,
        reserved: asyncio.Future[int],
        terms: BillingTerms,
        commit_now: Callable[[], None] = lambda: None,
        key_id: str | None = None,
        progress: Progress = Progress(),  # frozen
    ) -> None:
        """`commit_now` commits a reservation that waits to be committed with others.

        `progress` is that of a continued answer, whose ids the engine hands over once more.
        """
        self.stream = stream
        self.turn = turn
        self.suspended_progress = progress
        self.key_id = key_id
        self.terms = terms
        self.begun_s = time.monotonic()
        """The time at which its reservation was made."""
        self.finish = "abort"
        """What the ledger calls the end, in its column `outcome`: finish reasons, or an error's code."""
        self.outcome = Outcome.FAILED
        self.emitted_tokens = sum(map(len, progress.token_ids))
        """Token ids that engines handed over, each once; see Engine.pop_emitted_tokens."""
        self._earlier_tokens = self.emitted_tokens
        self.read_whole = False
        """True if the generation was read to its end."""
        self.saved_id = 0
        self.checkpointed = False
        """True if the store may have events of it already."""
        self.settled = False
        self.request_seq: int | None = None
        """The reservation's row, once it is committed."""
        self._reserved = reserved
        self._commit_now = commit_now
        self._counts = counts
        self._released: dict[int, Counts] = dict(progress.released)
        ids = progress.token_ids or [()] * turn.request.n
        self._generated = [array("I", token_run) for token_run in ids]
        self._to_repeat = {choice: len(token_run) for choice, token_run in enumerate(progress.token_ids)}
        """Ids of each choice that the engine has yet to hand over once more."""
        self._prompt_ids: bytes | None = None
        self._base_seq: int | None = None
        if turn.answer_ids:
            num_taken = prompt.past_runs
            shared = sum(len(token_run) for token_run in turn.request.past[:num_taken])
            self._prompt_ids = _packed(prompt.token_ids[shared:])
            self._base_seq = turn.run_seqs[num_taken - 1] if num_taken else None

    # Its reservation, checkpoints and settlement: the journal's side

    async def committed(self) -> None:
        """Wait until the reservation is committed. Raises StorageUnavailable, NotFound."""
        if self.request_seq is None:
            self._commit_now()
            self.request_seq = await asyncio.shield(self._reserved)

    def checkpoint(self) -> Checkpoint | None:
        """Counts and events since the last checkpoint; None without an event or a row."""
        if self.request_seq is None or (segment := self.stream.dump(self.saved_id)) is None:
            return None
        self.checkpointed = True
        usage = self.usage(unreleased=self.stream.unreleased)
        return Checkpoint(self.request_seq, usage, *segment)

    def saved(self, last_id: int) -> None:
        """Note that the store has the events up to `last_id`."""
        self.checkpointed, self.saved_id = True, last_id

    def unsaved(self, *, done: bool = False) -> tuple[tuple[int, bytes] | None, bool]:
        """A segment for the store, as of `TokenStream.dump`, and whether it has all events.

        It has those since the last checkpoint where the ring has lost its beginning.
        """
        segment = self.stream.dump(0, done=done)
        if segment is not None and segment[0] == 1:
            return segment, True
        return self.stream.dump(self.saved_id, done=done), False

    def finish_as(self, finish: str) -> None:
        """Set the finish for the ledger. Does nothing after the settlement."""
        if not self.settled:
            self.finish = finish

    def mark_settled(self) -> bool:
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
        """The status of the turn's answers. An answer that ended by itself is complete, client or not."""
        if self.outcome is Outcome.HALTED:
            return "blocked"
        if self.outcome in (Outcome.DONE, Outcome.BUDGET):
            return "complete"
        cancelled = self.stream.cancelled
        if cancelled in (SHUTDOWN, SUSPENDED, STORAGE) or isinstance(self.stream.error, Interrupted):
            return "interrupted"
        return "failed" if cancelled is None else "cancelled"

    def usage(self, *, unreleased: bool = False) -> Usage:
        """The counts so far, over all choices; the prompt counts once.

        Held text counts as withheld until it is released. Reasoning tokens count only once released. With
        `unreleased` (see TokenStream) the whole answer is withheld.
        """
        first = first_of(self._counts)
        completion_tokens = sum(c.completion_tokens for c in self._counts.values())
        released = () if unreleased else self._released.values()
        released_tokens = sum(c.completion_tokens for c in released)
        return Usage(
            prompt_tokens=first.prompt_tokens,
            completion_tokens=completion_tokens,
            cached_tokens=first.cached_tokens,
            reasoning_tokens=sum(c.reasoning_tokens for c in released),
            withheld_tokens=max(completion_tokens - released_tokens, 0),
        )

    def progress(self) -> Progress:
        """The state of each choice now."""
        return Progress(self._generated, dict(self._counts), dict(self._released))

    def answer_rows(self, answers: Mapping[int, ChoiceMessage], status: Status) -> list[FinishedAnswer]:
        """The turn's answers as they are stored."""
        return [
            finished_answer(answer_id, answers.get(choice, ChoiceMessage()), status, self._ids(choice))
            for choice, answer_id in enumerate(self.turn.answer_ids)
        ]

    def _ids(self, choice: int) -> Ids:
        if self._prompt_ids is None or self.outcome is Outcome.HALTED:  # no later turn begins with these
            return NO_IDS
        num_released = self.released_counts(choice).completion_tokens
        return self._generated[choice][:num_released].tobytes(), self._prompt_ids, self._base_seq


def finished_answer(
    answer_id: str, answer: ChoiceMessage, status: Status, ids: Ids = NO_IDS
) -> FinishedAnswer:
    """An answer as it is stored: its text, and its whole message where it is more than text."""
    message = answer.message
    text, body = message.get("content") or "", None
    if message.keys() - {"role", "content"}:
        body = orjson.dumps(message)
    return FinishedAnswer(answer_id, text, body, status, answer.finish_reason, *ids)


def _packed(token_ids: Sequence[int]) -> bytes | None:
    """Ids as little-endian uint32; None where a model has others, as placeholders of images are."""
    try:
        return array("I", token_ids).tobytes()
    except OverflowError:
        return None
