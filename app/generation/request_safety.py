"""Safety along a request, as the pipeline sees it, and its counterpart for a server with safety off.

prescreen ──▶ the verdict of the n-grams, at once; for an answer that goes on, `resume`: its verdict of before
render ──▶ the prompt, with the operator's words in front where the policy has some
start_full_screen ──▶ the full verdict begins, in a thread, beside the prefill: rendering has a thread
               too, and of two only one runs Python at a time
await_verdict ──▶ waits for it: no status line and no token goes out sooner
open_screen ──▶ what every delta goes through
ended ──▶ what is counted and stored of it, and the `moderation` object
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from app.core import ChatRequest, Counts, Delta, Engine, Key, Prompt
from app.generation.history import LoadedTurn
from app.safety import moderation
from app.safety.verdict import Verdict
from app.stream.token_stream import TokenStream


class AnswerScreen(Protocol):
    """What every delta of an answer goes through (app.safety.stream.stream_screen.Screening)."""

    @property
    def halted(self) -> Verdict | None:
        """The verdict that ended the answer."""
        ...

    @property
    def in_review(self) -> bool:
        """Whether `review` is to be asked before another delta is fed."""
        ...

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """What may be released now that `delta` has come. Raises ScreenFailed."""
        ...

    async def review(self) -> Sequence[Delta]:
        """What may be released once the suspected part is examined. Raises ScreenFailed."""
        ...

    def drain(self) -> Sequence[Delta]:
        """What may be released of an answer that broke off."""
        ...


class RequestSafety(Protocol):
    """The safety steps of one request, in the order in which they are called."""

    @property
    def rid(self) -> str:
        """The engine's id of the generation."""
        ...

    @property
    def undecided(self) -> bool:
        """Whether `await_verdict` has to wait."""
        ...

    async def prescreen(self, turn: LoadedTurn) -> None:
        """Judge the prompt by its n-grams. Raises ContentFiltered, ScreenFailed."""
        ...

    def state(self) -> Mapping[str, Any]:
        """What `resume` needs of this in another process, as JSON: nothing that was said."""
        ...

    async def resume(self, turn: LoadedTurn, state: Mapping[str, Any]) -> None:
        """In place of `prescreen`: go on with a prompt that may be answered. Raises ScreenFailed."""
        ...

    async def render(self, engine: Engine, request: ChatRequest) -> Prompt:
        """The prompt as the model is to read it. Raises what `Engine.render` does."""
        ...

    def start_full_screen(self) -> None:
        """Begin to read the whole prompt, unless the n-grams were enough."""
        ...

    async def await_verdict(self) -> None:
        """Wait until the prompt may be answered. Raises ContentFiltered, ScreenFailed."""
        ...

    def open_screen(self) -> AnswerScreen:
        """The screen of the answer. Never raises: where there can be none, its `feed` does."""
        ...

    def ended(
        self, screen: AnswerScreen | None, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> Mapping[str, Any] | None:
        """Account for an answer that has ended; its `moderation` object, if it is to have one."""
        ...

    def close(self, stream: TokenStream) -> None:
        """Stop what is still being read of the prompt, and remember what was released in `stream`."""
        ...


SafetyOf = Callable[[ChatRequest, Key | None], RequestSafety]
"""Makes what a request made with a key goes through."""


class PassThrough:
    """The screen of an unscreened answer: every delta passes."""

    halted: Verdict | None = None
    in_review = False

    def feed(self, delta: Delta) -> Sequence[Delta]:
        """See AnswerScreen."""
        return (delta,)

    async def review(self) -> Sequence[Delta]:
        """See AnswerScreen."""
        return ()

    def drain(self) -> Sequence[Delta]:
        """See AnswerScreen."""
        return ()


class Unscreened:
    """A request to a server with safety off: nothing is screened, and nothing is held back."""

    undecided = False

    def __init__(self, request: ChatRequest, _key: Key | None = None) -> None:
        self.rid = request.request_id
        self._moderated = request.moderated

    async def prescreen(self, turn: LoadedTurn) -> None:
        """See RequestSafety."""

    def state(self) -> Mapping[str, Any]:
        """See RequestSafety."""
        return {}

    async def resume(self, turn: LoadedTurn, state: Mapping[str, Any]) -> None:
        """See RequestSafety."""

    async def render(self, engine: Engine, request: ChatRequest) -> Prompt:
        """See RequestSafety."""
        return await engine.render(request)

    def start_full_screen(self) -> None:
        """See RequestSafety."""

    async def await_verdict(self) -> None:
        """See RequestSafety."""

    def open_screen(self) -> AnswerScreen:
        """See RequestSafety."""
        return PassThrough()

    def ended(
        self, screen: AnswerScreen | None, counts: Mapping[int, Counts], withheld_tokens: int
    ) -> Mapping[str, Any] | None:
        """See RequestSafety."""
        del screen, counts, withheld_tokens
        unjudged = moderation.not_judged()
        return moderation.moderation(unjudged, unjudged) if self._moderated else None

    def close(self, stream: TokenStream) -> None:
        """See RequestSafety."""
