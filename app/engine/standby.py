"""An engine beside the main one: started while that serves, and again where its start failed.

Nobody waits for it: `start` returns at once, and until the model is there, or while it is away, `health` is
STARTING. Its end ends nothing else; the next one is made after 1, 2, 4 … 60 s.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence

from app.core import ChatRequest, Delta, Engine, EngineLoad, Health, ModelCard, Prompt
from app.engine.restart import Backoff, restart_with_backoff
from app.errors import EngineNotReady, ServingError

FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0

MakeEngine = Callable[[Callable[[str], None]], Engine]
"""Makes the engine, which calls back with the reason when its model has gone, for a while or for good."""


class SupervisedEngine:
    """See the module; an `Engine` itself. `name` is known before its model is."""

    def __init__(self, name: str, make: MakeEngine, *, first_pause_s: float = FIRST_PAUSE_S) -> None:
        self.name = name
        self.failure: str | None = None
        """Why it was last away."""
        self.num_failures = 0
        self._make = make
        self._first_pause_s = first_pause_s
        self._engine: Engine | None = None
        self._closed = False
        self._gone = asyncio.Event()
        self._running: asyncio.Task[None] | None = None

    @property
    def state(self) -> str:
        """The state of the engine, in words."""
        if self.health() is Health.READY:
            return "ready"
        return "starting" if self.failure is None else f"down: {self.failure}"

    @property
    def model(self) -> ModelCard:
        """The model, once it has been there. Raises EngineNotReady before."""
        return self._present().model

    async def start(self) -> None:
        """Begin to start it; returns at once, and raises nothing."""
        self._running = asyncio.create_task(self._run(), name=f"standby {self.name}")

    async def aclose(self) -> None:
        """Stop it; a second call does nothing."""
        self._closed = True
        running, self._running = self._running, None
        if running is not None:
            running.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await running
        if self._engine is not None:
            await self._engine.aclose()

    def tokenizer_json(self) -> str | None:
        """See Engine.tokenizer_json."""
        return self._present().tokenizer_json()

    async def tokenize(self, owner: str, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """See Engine.tokenize."""
        return await self._present().tokenize(owner, text, add_special_tokens=add_special_tokens)

    async def detokenize(
        self, owner: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """See Engine.detokenize."""
        return await self._present().detokenize(owner, token_ids, skip_special_tokens=skip_special_tokens)

    async def render(self, request: ChatRequest) -> Prompt:
        """See Engine.render."""
        return await self._present().render(request)

    def generate(self, rid: str, prompt: Prompt) -> AsyncIterator[Delta]:
        """See Engine.generate."""
        return self._present().generate(rid, prompt)

    def abort(self, rid: str) -> None:
        """See Engine.abort."""
        if self._engine is not None:
            self._engine.abort(rid)

    def pop_emitted_tokens(self, rid: str) -> int:
        """See Engine.pop_emitted_tokens."""
        return 0 if self._engine is None else self._engine.pop_emitted_tokens(rid)

    def load(self) -> EngineLoad:
        """See Engine.load. Raises EngineNotReady before its model has been there."""
        return self._present().load()

    def health(self) -> Health:
        """See Engine.health; DEAD only once it is closed."""
        if self._closed:
            return Health.DEAD
        ready = self._engine is not None and self._engine.health() is Health.READY
        return Health.READY if ready else Health.STARTING

    # --- inside

    def _present(self) -> Engine:
        if self._engine is None:
            raise EngineNotReady(f"The model {self.name!r} is {self.state}.", retry_after_s=5)
        return self._engine

    async def _run(self) -> None:
        """Have one running, for ever: the old one is there, dead, until the next has started."""
        await restart_with_backoff(self._run_once, Backoff(self._first_pause_s, LONGEST_PAUSE_S))

    async def _run_once(self) -> bool:
        """Start another one and wait for its end; False where it did not start."""
        if not await self._started():
            return False
        await self._lost()
        return True

    async def _started(self) -> bool:
        """Start another one; whether that succeeded."""
        engine: Engine | None = None

        def went(reason: str) -> None:
            if engine is not None and self._engine is engine:  # else it starts, and it is `start` that fails
                self._fail(reason)
                self._gone.set()

        try:
            engine = self._make(went)
            await engine.start()
        except Exception as exc:  # noqa: BLE001  # whatever it is, the next one may do better
            self._fail(exc.message if isinstance(exc, ServingError) else type(exc).__name__)
            if engine is not None:
                await engine.aclose()
            return False
        except BaseException:
            if engine is not None:
                await engine.aclose()
            raise
        previous, self._engine = self._engine, engine
        if previous is not None:
            await previous.aclose()
        return True

    async def _lost(self) -> None:
        """Wait until the engine has ended for good; one that comes back by itself has not."""
        while self._engine is not None and self._engine.health() is not Health.DEAD:
            self._gone.clear()
            await self._gone.wait()

    def _fail(self, reason: str) -> None:
        self.failure = reason
        self.num_failures += 1
