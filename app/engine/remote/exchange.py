"""One choice of a request on its way through remote servers: sent, moved while it may be, read, aborted.

| what happens | nothing has come yet | something has come |
|---|---|---|
| server gone, garbage, no headers | the next server; after `ATTEMPTS`, EngineNotReady | EngineFailed |
| 429, 503 | a server not tried yet; without one, EngineOverloaded | EngineFailed |
| 400 | BadRequest | BadRequest |
| abort, unanswered for `ABORT_WAIT_S` | ends with the counts received | the same |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Mapping
from http import HTTPStatus
from typing import Any

from app.engine.remote.events import DONE, ChoiceReader, ChoiceStep, EventReader, Refusal, UnreadableEvent
from app.engine.remote.model import ChoiceSink
from app.engine.remote.server import Read, RemoteServer, ServerGone
from app.engine.remote.server_pool import ServerPool
from app.engine.tally import TokenTally
from app.errors import EngineFailed, EngineNotReady

ATTEMPTS = 3
RETRY_PAUSE_S = 0.2
ABORT_WAIT_S = 5.0
ABORT_AGAIN_S = 0.5
"""An abort that overtakes its request is ignored by SGLang: it is sent again until the end has come."""
OVERLOADED = frozenset({429, 503})
DRAIN_S = 0.5
ABORTED: Mapping[str, Any] = {"type": "abort", "message": "aborted"}

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]
"""Starts a task that the engine ends at the latest when it is closed."""


class ChoiceRequest:
    """One choice; its steps go to `sink`, exactly one of them final, or one error."""

    def __init__(
        self,
        pool: ServerPool,
        rid: str,
        body: Mapping[str, Any],
        sink: ChoiceSink,
        *,
        tally: TokenTally,
        spawn: Spawn,
    ) -> None:
        self._pool = pool
        self._spawn = spawn
        self._rid = rid
        self._body = body
        self._sink = sink
        self._tally = tally
        self._reader = ChoiceReader(sink.counts.prompt_tokens)
        self._sent: tuple[RemoteServer, str] | None = None
        self._running: asyncio.Task[None] | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._aborted = False
        self._ended = False

    def start(self, *, aborted: bool = False) -> None:
        """Send it; what was aborted before ends at once."""
        if aborted:
            self._end(dict(ABORTED))
        else:
            self._running = self._spawn(self._run())

    def abort(self) -> None:
        """Stop it: the server is asked to, and its last event is waited for, not for long."""
        if not self._aborted and not self._ended and self._running is not None:
            self._aborted = True
            self._aborting = self._spawn(self._abort())

    def leave(self) -> None:
        """Close the connection, as nobody reads the choice; its server then aborts the request."""
        if not self._ended:
            self._ended = True
            for task in (self._running, self._aborting):
                if task is not None:
                    task.cancel()

    # --- the way there

    async def _run(self) -> None:
        tried: list[RemoteServer] = []
        why = "no server can be reached"
        try:
            for attempt in range(ATTEMPTS):
                server = self._pool.pick(tried) or self._pool.pick()
                if server is None or self._aborted:
                    break
                if server in tried:
                    await asyncio.sleep(RETRY_PAUSE_S * attempt)
                tried.append(server)
                try:
                    await self._ask(server, f"{self._rid}-{attempt}")
                except ServerGone as gone:
                    server.breaker.failed(asyncio.get_running_loop().time())
                    why = str(gone)
                    if self._begun or self._aborted:
                        break
                except Refusal as refused:
                    if self._may_ask_elsewhere(refused, tried):
                        continue
                    self._refused(refused)
                if self._ended:
                    return
            self._give_up(why)
        except Exception as exc:  # noqa: BLE001  # whatever it is, the reader must be told
            self._fail(EngineFailed(f"The answer could not be read: {type(exc).__name__}."))

    @property
    def _begun(self) -> bool:
        """Whether anything came that cannot be taken back."""
        return self._reader.counts.completion_tokens > 0

    def _may_ask_elsewhere(self, refused: Refusal, tried: list[RemoteServer]) -> bool:
        full = refused.status in OVERLOADED
        return full and not self._begun and not self._aborted and self._pool.pick(tried) is not None

    def _refused(self, refused: Refusal) -> None:
        """End the choice by the server's refusal: an error of the request, or of the server in mid-answer."""
        if self._begun and refused.status != HTTPStatus.BAD_REQUEST:
            self._fail(EngineFailed("The model's server gave the answer up half-way."))
        else:
            self._end(refused.finish)

    def _give_up(self, why: str) -> None:
        if self._ended:
            return
        if self._aborted:
            self._end(dict(ABORTED))
        elif self._begun:
            self._fail(EngineFailed(f"The model's server was lost in mid-answer: {why}."))
        else:
            self._fail(EngineNotReady(f"The model's server cannot be reached: {why}.", retry_after_s=5))

    async def _ask(self, server: RemoteServer, rid: str) -> None:
        """One attempt. Raises ServerGone, Refusal; returns when the choice has ended."""
        body = {**self._body, "rid": rid, "stream": True}
        self._reader = ChoiceReader(self._sink.counts.prompt_tokens)
        async with server.generate(body) as read:
            self._sent = server, rid
            try:
                await self._read(read)
            finally:
                self._sent = None
            await _drain(read)
        server.breaker.succeeded()

    async def _read(self, read: Read) -> None:
        """Read until the choice has ended. Raises ServerGone, Refusal."""
        events = EventReader()
        try:
            while data := await read():
                for payload in events.feed(data):
                    if payload == DONE:
                        raise ServerGone("the answer has no end")
                    if self._take(self._reader.read(payload)):
                        return
        except UnreadableEvent as exc:
            raise ServerGone(str(exc)) from None
        raise ServerGone("the answer broke off")

    # --- the way back

    def _take(self, step: ChoiceStep) -> bool:
        """Hand a step on; whether it was the last. Raises Refusal for an abort that is the server's own."""
        finish = step.finish
        if finish is not None:
            status = finish.get("status_code")
            if status is not None:
                raise Refusal(int(status), str(finish.get("message") or ""))
            self._ended = True
        self._tally.add(len(step.token_ids))
        self._sink.take(step.text, step.token_ids, finish, step.counts, step.logprobs, 0)
        return finish is not None

    def _end(self, finish: dict[str, Any]) -> None:
        """A last step of our own making: an abort, or what the server refused."""
        if not self._ended:
            self._ended = True
            self._sink.take("", (), finish, self._reader.counts, None, 0)

    def _fail(self, error: EngineFailed | EngineNotReady) -> None:
        if not self._ended:
            self._ended = True
            self._sink.fail(error)

    async def _abort(self) -> None:
        """Ask until it has ended; then, without an answer, end it here and leave the connection."""
        for _ in range(int(ABORT_WAIT_S / ABORT_AGAIN_S)):
            if self._sent is not None:
                server, rid = self._sent
                with contextlib.suppress(ServerGone):
                    await server.abort(rid)
            if await self._ends_within(ABORT_AGAIN_S):
                return
        self._end(dict(ABORTED))
        assert self._running is not None
        self._running.cancel()

    async def _ends_within(self, timeout_s: float) -> bool:
        assert self._running is not None
        done, _ = await asyncio.wait([self._running], timeout=timeout_s)
        return bool(done)


async def _drain(read: Read) -> None:
    """Read to the end what follows the last event, so that the connection can be used again."""
    with contextlib.suppress(ServerGone, TimeoutError):
        async with asyncio.timeout(DRAIN_S):
            while await read():
                pass
