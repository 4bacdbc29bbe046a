"""Safety along one request, as the pipeline sees it. A session is handed values and knows no stream.

`SafetySession` screens nothing (`safety = off`); `ScreenedSession` (app.safety.session.screened) screens.

prescreen ──▶ the n-grams' verdict, at once; for a continued answer `restore`: the verdict of the time before
render ──▶ the prompt, with the operator's words in front where the policy has some
start_full_screen ──▶ the full verdict begins, in a thread, beside the prefill and after rendering: two
               threads of Python would only slow each other
await_verdict ──▶ waits for it: no status line and no token is sent sooner
open_screen ──▶ the screen of the answer, through which every delta passes
conclude ──▶ the answer is counted and stored, and its `moderation` object made
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from app.core import ChatRequest, Counts, Delta, Engine, Key, Prompt
from app.safety import moderation
from app.safety.verdict import Verdict
from app.store.conversations import NewTurn


class AnswerScreen(Protocol):
    """The screen of an answer (app.safety.stream.stream_screen.Screening)."""

    @property
    def halted(self) -> Verdict | None:
        """The verdict that ended the answer."""
        ...

    @property
    def in_review(self) -> bool:
        """True if `review` has to be awaited before another delta is fed."""
        ...

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """The deltas that may be released now that `delta` was generated. Raises ScreenFailed."""
        ...

    async def review(self) -> Sequence[Delta]:
        """The deltas that may be released once the suspected part is examined. Raises ScreenFailed."""
        ...

    def take_releasable(self) -> Sequence[Delta]:
        """The deltas that may be released of an interrupted answer."""
        ...


class PassThrough:
    """The screen of an unscreened answer: every delta passes."""

    halted: Verdict | None = None
    in_review = False

    def feed(self, delta: Delta) -> Sequence[Delta]:
        return (delta,)

    async def review(self) -> Sequence[Delta]:
        return ()

    def take_releasable(self) -> Sequence[Delta]:
        return ()


class PastTurns(NamedTuple):
    """The conversation of a request, for its session. By default there is none."""

    strikes: int = 0
    """Turns that safety has blocked."""
    from_store: Sequence[bool | None] = ()
    """For each of the first messages, read from the store, True if it is an answer of this server; None if it
    was imported, and is to be judged as one that the request holds."""
    num_bytes: int = 0
    """The size of the request with its conversation."""


class SafetySession:
    """The safety steps of one request, in the order in which they are called.

    This one is of a server with safety off: nothing is screened, and nothing is held back.
    """

    def __init__(self, request: ChatRequest, key: Key | None = None) -> None:
        self.rid = request.request_id
        """The engine's id of the generation."""
        self.request = request
        self.key = key

    @property
    def undecided(self) -> bool:
        """True if `await_verdict` has to wait."""
        return False

    async def prescreen(self, request: ChatRequest, past: PastTurns, turn: NewTurn | None) -> None:
        """Judge the prompt of a request, which has its conversation's messages in front, by its n-grams.

        `turn` is stored with a late refusal. Raises BadRequest, ContentFiltered, ScreenFailed.
        """

    def state(self) -> Mapping[str, Any]:
        """The JSON object that `restore` needs in another process; it has no text."""
        return {}

    async def restore(self, request: ChatRequest, past: PastTurns, state: Mapping[str, Any]) -> None:
        """In place of `prescreen`: continue with a prompt that may be answered. Raises ScreenFailed."""

    async def render(self, engine: Engine, request: ChatRequest) -> Prompt:
        """The prompt as the model is to read it. Raises what `Engine.render` and `await_verdict` do."""
        return await engine.render(request)

    def start_full_screen(self) -> None:
        """Begin to read the whole prompt, unless the n-grams were enough."""

    async def await_verdict(self) -> None:
        """Wait until the prompt may be answered. Raises ContentFiltered, ScreenFailed."""

    def open_screen(self) -> AnswerScreen:
        """The screen of the answer. Never raises: where there can be none, its `feed` does."""
        return PassThrough()

    def conclude(
        self, screen: AnswerScreen | None, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> Mapping[str, Any] | None:
        """Account for an answer that has ended; its `moderation` object, if it is to have one."""
        del screen, counts, withheld_tokens
        unjudged = moderation.not_judged()
        return moderation.moderation(unjudged, unjudged) if self.request.moderated else None

    def close(self, released: Iterable[Mapping[str, Any]]) -> None:
        """Stop reading the prompt, and remember the messages that were released.

        `released` is iterated only where they are to be remembered.
        """


SessionOf = Callable[[ChatRequest, Key | None], SafetySession]
"""Makes the session of a request that was made with a key."""
