"""The beginning of an answer: a new one, or one that goes on after the text that an earlier process released.

| stage         | a new answer                                  | a continued answer                       |
| load          | its conversation, and a verdict on its prompt | the turn and the verdict of then         |
| engine_prompt | the prompt as it is                           | the prompt, and the ids generated then   |
| reserve       | a row in the ledger                           | its row, which is suspended no more      |
| fail          | its error ends the stream                     | it ends as interrupted, or as cancelled  |
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from app.core import ChatRequest, Counts, Delta, Key, Prompt
from app.errors import Interrupted, RateLimited, ServingError, Unavailable
from app.journal.entry import JournalEntry, Outcome, Progress
from app.journal.history import History, LoadedTurn
from app.journal.journal import Journal
from app.resume.snapshot import SuspendedRequest
from app.resume.suspensions import Suspensions
from app.safety.session.session import SafetySession
from app.store.usage import usage_body
from app.stream.token_stream import ABANDONED, SHUTDOWN, STORAGE, SUSPENDED, TokenStream

ByChoice = Mapping[int, Counts]


class AnswerStart:
    """An answer from its first token."""

    progress = Progress()
    """The state in which the answer begins."""

    def __init__(self, history: History, journal: Journal) -> None:
        self._history = history
        self._journal = journal

    async def load(self, request: ChatRequest, session: SafetySession) -> LoadedTurn:
        """The request with its conversation's messages, prescreened as far as that is to be done.

        Raises what `History.load` and `SafetySession.prescreen` do.
        """
        turn = await self._history.load(request)
        await session.prescreen(turn.request, turn.past, turn.stored_turn)
        return turn

    def engine_prompt(self, prompt: Prompt) -> Prompt:
        """The prompt as the engine is to answer it."""
        return prompt

    async def reserve(
        self, turn: LoadedTurn, prompt: Prompt, stream: TokenStream, counts: ByChoice, key: Key | None
    ) -> JournalEntry:
        """The entry of the request's row in the ledger. Raises StorageUnavailable, NotFound."""
        return await self._journal.reserve(turn, prompt, stream, counts, key=key)

    def should_suspend(self, stream: TokenStream, error: ServingError) -> bool:
        """True if the request is suspended, or stays so, in place of ending in `error`."""
        del stream, error
        return False

    def fail(self, stream: TokenStream, error: ServingError, counts: ByChoice) -> JournalEntry | None:
        """End the stream of a request that has no entry yet; the entry that is to be settled, if any."""
        del counts
        stream.fail(error)
        return None


class ContinuedStart(AnswerStart):
    """An answer that an earlier process began. Its stream has the events that were released."""

    def __init__(
        self,
        suspended: SuspendedRequest,
        journal: Journal,
        suspensions: Suspensions,
        check_model: Callable[[str], None],
    ) -> None:
        """`check_model` raises UnknownModel for a model that is not served to the request's key any more."""
        self.progress = suspended.progress
        self._suspended = suspended
        self._journal = journal
        self._suspensions = suspensions
        self._check_model = check_model

    async def load(self, request: ChatRequest, session: SafetySession) -> LoadedTurn:
        """The suspended turn, with its session restored. Raises UnknownModel, ScreenFailed."""
        self._check_model(request.model)
        turn = self._suspended.turn
        await session.restore(turn.request, turn.past, self._suspended.safety)
        return turn

    def engine_prompt(self, prompt: Prompt) -> Prompt:
        if not any(self.progress.token_ids):
            return prompt
        return replace(prompt, continued=self.progress.token_ids)

    async def reserve(
        self, turn: LoadedTurn, prompt: Prompt, stream: TokenStream, counts: ByChoice, key: Key | None
    ) -> JournalEntry:
        del turn, key  # the row has it
        return self._suspensions.continue_(self._suspended, prompt, stream, counts)

    def should_suspend(self, stream: TokenStream, error: ServingError) -> bool:
        """True if the answer stays suspended: a full server, and a client that left, do not end it."""
        if stream.cancelled is not None:
            return stream.cancelled in (SUSPENDED, ABANDONED)
        return isinstance(error, Unavailable | RateLimited)

    def fail(self, stream: TokenStream, error: ServingError, counts: ByChoice) -> JournalEntry | None:
        entry = self._suspensions.continue_(self._suspended, Prompt((), 0, None), stream, counts)
        if stream.cancelled not in (None, SHUTDOWN, STORAGE):
            _stop(stream, entry)
        else:
            usage = entry.usage(unreleased=stream.unreleased)
            details = {"last_event_id": stream.last_id, "usage": usage_body(usage)}
            message = f"The server was restarted, and the answer could not be continued: {error.message}"
            stream.fail(Interrupted(message, details))
        return entry


def _stop(stream: TokenStream, entry: JournalEntry) -> None:
    """End a cancelled answer as one that is cancelled while the engine generates it."""
    for choice in sorted(set(range(stream.request.n)) - stream.finish_reasons().keys()):
        stream.append(Delta(choice, "text", "", (), entry.released_counts(choice), "abort"))
    entry.end(Outcome.CANCELLED)
    stream.conclude(entry.usage(), None)
    stream.close()
