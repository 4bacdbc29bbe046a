"""Where an answer begins: anew, or behind what the process before has said of it.

| stage   | a new answer                                      | one that goes on                           |
| load    | its conversation's messages; the prompt is judged | its turn and the prompt's verdict, as then |
| resumed | the prompt as it is                               | the prompt, and the ids generated before   |
| reserve | a row in the ledger                               | its row, which is suspended no more        |
| failed  | its error is the stream's end                     | it stays suspended, or ends as interrupted |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Protocol

from app.core import ChatRequest, Counts, Delta, Key, Prompt
from app.errors import Cancelled, Interrupted, RateLimited, ServingError, Unavailable
from app.generation.history import History, LoadedTurn
from app.generation.journal import Journal
from app.generation.journal_entry import JournalEntry
from app.generation.progress import Progress
from app.generation.request_safety import RequestSafety
from app.generation.suspended import SuspendedRequest
from app.generation.suspensions import Suspensions
from app.generation.trace import Trace
from app.store.usage import usage_body
from app.stream.ring import Finished
from app.stream.token_stream import ABANDONED, SUSPENDED, TokenStream


class AnswerStart(Protocol):
    """The beginning of an answer; see the module."""

    @property
    def progress(self) -> Progress:
        """How far the answer has come already."""
        ...

    async def load(self, request: ChatRequest, check: RequestSafety) -> LoadedTurn:
        """The request with its conversation's messages, prescreened as far as that is to be done.

        Raises what `History.load` and `RequestSafety.prescreen` do.
        """
        ...

    def resumed(self, prompt: Prompt) -> Prompt:
        """The prompt as the engine is to answer it."""
        ...

    async def reserve(
        self, turn: LoadedTurn, prompt: Prompt, stream: TokenStream, trace: Trace, key: Key | None
    ) -> JournalEntry:
        """The entry of the request's row in the ledger. Raises StorageUnavailable, NotFound."""
        ...

    def stays(self, stream: TokenStream, error: ServingError) -> bool:
        """Whether the request is suspended, or stays so, in place of ending in `error`."""
        ...

    def failed(self, stream: TokenStream, error: ServingError, trace: Trace) -> JournalEntry | None:
        """End the stream of a request that has no entry yet; the entry that is to be settled, if any."""
        ...


class NewAnswer:
    """An answer from its first token."""

    progress = Progress()

    def __init__(self, history: History, journal: Journal) -> None:
        self._history = history
        self._journal = journal

    async def load(self, request: ChatRequest, check: RequestSafety) -> LoadedTurn:
        """See AnswerStart."""
        turn = await self._history.load(request)
        await check.prescreen(turn)
        return turn

    def resumed(self, prompt: Prompt) -> Prompt:
        """See AnswerStart."""
        return prompt

    async def reserve(
        self, turn: LoadedTurn, prompt: Prompt, stream: TokenStream, trace: Trace, key: Key | None
    ) -> JournalEntry:
        """See AnswerStart."""
        return await self._journal.reserve(turn, prompt, stream, trace.counts, key=key)

    def stays(self, stream: TokenStream, error: ServingError) -> bool:
        """See AnswerStart."""
        del stream, error
        return False

    def failed(self, stream: TokenStream, error: ServingError, trace: Trace) -> JournalEntry | None:
        """See AnswerStart."""
        del trace
        stream.fail(error)
        return None


class ContinuedAnswer:
    """An answer that the process before has begun. `stream` has what was released of it."""

    def __init__(
        self,
        suspended: SuspendedRequest,
        journal: Journal,
        suspensions: Suspensions,
        check_model: Callable[[str], None],
    ) -> None:
        """`check_model` raises UnknownModel for a model that is not served to the request's key any more."""
        self._check_model = check_model
        self._suspended = suspended
        self._journal = journal
        self._suspensions = suspensions
        self.progress = suspended.progress

    async def load(self, request: ChatRequest, check: RequestSafety) -> LoadedTurn:
        """See AnswerStart. Raises UnknownModel."""
        self._check_model(request.model)
        await check.resume(self._suspended.turn, self._suspended.safety)
        return self._suspended.turn

    def resumed(self, prompt: Prompt) -> Prompt:
        """See AnswerStart."""
        if not any(self.progress.token_ids):
            return prompt
        return replace(prompt, continued=self.progress.token_ids)

    async def reserve(
        self, turn: LoadedTurn, prompt: Prompt, stream: TokenStream, trace: Trace, key: Key | None
    ) -> JournalEntry:
        """See AnswerStart. Nothing more is awaited of the choices that had ended."""
        del key  # the row has it
        for event in stream.held()[1]:
            if isinstance(event, Finished):
                last = Delta(event.choice, "text", "", (), Counts(), event.finish_reason)
                trace.finished(last)
        return self._take_up(turn, prompt, stream, trace.counts)

    def _take_up(
        self, turn: LoadedTurn, prompt: Prompt, stream: TokenStream, counts: Mapping[int, Counts]
    ) -> JournalEntry:
        self._suspensions.taken_up(stream.request_id)
        return self._journal.take_up(self._suspended, turn, prompt, stream, counts)

    def stays(self, stream: TokenStream, error: ServingError) -> bool:
        """See AnswerStart. A server without room, or readers that left, are no reason to end it."""
        if stream.cancelled is not None:
            return stream.cancelled in (SUSPENDED, ABANDONED)
        return isinstance(error, Unavailable | RateLimited)

    def failed(self, stream: TokenStream, error: ServingError, trace: Trace) -> JournalEntry | None:
        """See AnswerStart."""
        entry = self._take_up(self._suspended.turn, Prompt((), 0, None), stream, trace.counts)
        stream.fail(_interrupted(stream, entry, error))
        return entry


def _interrupted(stream: TokenStream, entry: JournalEntry, error: ServingError) -> ServingError:
    """The error of an answer that could not go on."""
    if stream.cancelled is not None:
        return Cancelled("The request was cancelled while it waited.")
    details = {"last_event_id": stream.last_id, "usage": usage_body(entry.usage())}
    return Interrupted(f"The server was restarted, and the answer could not go on: {error.message}", details)
