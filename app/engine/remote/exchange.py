"""One choice of a request on its way through remote servers: sent, moved, read, aborted.

A server that dies under it is followed by another one, or by itself once it is back: the choice goes on
behind the ids that have come (app.engine.remote.continuation), its sink untouched. `Attempts` bounds how
often; what cannot be rebuilt elsewhere ends with `engine_restarted`.

| what the server says | nothing has come yet | something has come |
|---|---|---|
| 429, 503 | a server not tried yet; without one, EngineOverloaded | as if it had died |
| 400 | BadRequest | BadRequest; of the rest of an answer, `engine_restarted` |
| nothing on an abort for `ABORT_WAIT_S` | ends with the counts received | the same |
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from http import HTTPStatus
from typing import Any

from app.core import Counts
from app.engine.remote.attempts import Attempts
from app.engine.remote.continuation import (
    ContinuedText,
    Finish,
    Received,
    carried_body,
    check_resumable,
    replay,
    restarted,
    resumed_body,
)
from app.engine.remote.events import (
    DONE,
    ChoiceReader,
    ChoiceStep,
    EventReader,
    Refusal,
    UnreadableEvent,
    WrongCount,
)
from app.engine.remote.model import ChoiceSink
from app.engine.remote.route import Choice, Route
from app.engine.remote.server import Read, RemoteServer, ServerGone
from app.engine.tally import TokenTally
from app.errors import EngineFailed, ServingError

RETRY_PAUSE_S = 0.2
LONGEST_PAUSES = 5
"""A server that could not take it is asked again after one such pause, then after two, up to so many."""
ABORT_WAIT_S = 5.0
ABORT_AGAIN_S = 0.5
"""An abort that overtakes its request is ignored by SGLang: it is sent again until the end has come."""
OVERLOADED = frozenset({429, 503})
DRAIN_S = 0.5
ABORTED: Mapping[str, Any] = {"type": "abort", "message": "aborted"}
REPLAYED_AT_ONCE = 64
"""Tokens of an earlier run that are handed over before other work has its turn."""


class ChoiceRequest:
    """One choice; its steps go to `sink`, exactly one of them final, or one error."""

    def __init__(self, route: Route, choice: Choice, sink: ChoiceSink, tally: TokenTally) -> None:
        self._route = route
        self._choice = choice
        self._sink = sink
        self._tally = tally
        self._attempts = Attempts(route.resume_s)
        # SGLang's HTTP server cuts the logprobs of an answer that is taken up in the wrong place.
        self._carries_ids = route.carries_ids and not choice.body.get("return_logprob")
        self._received = Received()
        self._text: ContinuedText | None = None
        """The text behind the last loss of a server; None until then."""
        self._reader = ChoiceReader(0)
        self._counts = sink.counts
        self._first_cached: int | None = None
        """The cached tokens of the prompt at the server that was lost first, which are those that count."""
        self._leave_gate: Callable[[], None] = _nothing
        self._sent: tuple[RemoteServer, str] | None = None
        self._running: asyncio.Task[None] | None = None
        self._aborting: asyncio.Task[None] | None = None
        self._waits = False
        self._aborted = False
        self._ended = False

    def start(self, *, aborted: bool = False) -> None:
        """Send it; what was aborted before ends at once."""
        if aborted:
            self._end(dict(ABORTED))
        else:
            self._running = self._route.spawn(self._run())

    def abort(self) -> None:
        """Stop it: the server is asked to, and its last event is waited for, not for long."""
        if self._aborted or self._ended or self._running is None:
            return
        self._aborted = True
        if self._waits:  # no server has it
            self._end(dict(ABORTED))
            self._running.cancel()
        else:
            self._aborting = self._route.spawn(self._abort())

    def leave(self) -> None:
        """Close the connection, as nobody reads the choice; its server then aborts the request."""
        if not self._ended:
            self._ended = True
            for task in (self._running, self._aborting):
                if task is not None:
                    task.cancel()

    # --- the way there

    async def _run(self) -> None:
        try:
            if self._choice.continued:
                await self._hand_over_again()
            while not self._ended and not self._aborted:
                await self._try()
            self._end(dict(ABORTED))
        except ServingError as error:
            self._fail(error)
        except Exception as exc:  # noqa: BLE001  # whatever it is, the reader must be told
            self._fail(EngineFailed(f"The answer could not be read: {type(exc).__name__}."))
        finally:
            self._leave_gate()

    async def _try(self) -> None:
        """Send it to a server, if there is one in time. Raises the error that ends it."""
        if self._text is not None and self._text.left_tokens <= 0:  # its end was lost with its server
            self._end({"type": "length", "length": self._text.num_tokens})
            return
        server = await self._server()
        attempts = self._attempts
        rid = f"{self._choice.rid}-{attempts.number}"
        attempts.sent(server)
        try:
            await self._ask(server, rid)
        except ServerGone as gone:
            self._route.faults.fault(gone.kind, server.url, rid)
            server.breaker.failed(asyncio.get_running_loop().time())
            self._lost(server, str(gone), died=self._sent is not None)
        except Refusal as refused:
            self._refused(server, refused, rid)
        finally:
            self._sent = None
            self._leave_gate()

    async def _server(self) -> RemoteServer:
        """The server to send it to. Raises the error that ends it where there is none in time."""
        self._waits = True
        try:
            server = await (self._next_server() if self._attempts.has_moved else self._first_server())
        finally:
            self._waits = False
        if server is None:
            raise self._attempts.exhausted(begun=self._begun)
        return server

    async def _first_server(self) -> RemoteServer | None:
        pool, tried = self._route.pool, self._attempts.tried
        server = pool.pick(tried) or pool.pick()
        if server in tried:
            await asyncio.sleep(RETRY_PAUSE_S * min(len(tried), LONGEST_PAUSES))
        return server

    async def _next_server(self) -> RemoteServer | None:
        """Wait for a server that is well, and for a place at the gate."""
        attempts, pool, loop = self._attempts, self._route.pool, asyncio.get_running_loop()
        while (left_s := attempts.left_s(loop.time())) > 0:
            try:
                async with asyncio.timeout(left_s):
                    await pool.wait_for_server()
            except TimeoutError:
                break
            began_s = loop.time()
            self._leave_gate = await self._route.gate.enter()
            attempts.queued(loop.time() - began_s)
            server = await self._first_server()
            if server is not None:
                return server
            self._leave_gate()
        return None

    @property
    def _begun(self) -> bool:
        """Whether anything came that cannot be taken back."""
        return bool(self._received.token_ids) or self._text is not None

    def _lost(self, server: RemoteServer, why: str, *, died: bool) -> None:
        """Prepare to go on elsewhere. Raises the error that ends it."""
        if self._ended or self._aborted:
            return
        now_s = asyncio.get_running_loop().time()
        if died:
            self._attempts.died(server, why, now_s)
        else:
            self._attempts.missed(why, now_s)
        if self._begun and self._first_cached is None:
            self._first_cached = self._counts.cached_tokens
        error = self._attempts.verdict(now_s, begun=self._begun)
        if error is not None:
            raise error
        if self._text is not None:
            self._text.cut()
        elif self._begun and not self._carries_ids:
            check_resumable(self._choice.body["sampling_params"])
            self._text = self._received.continued(self._choice.rules(), self._choice.body["input_ids"])

    def _refused(self, server: RemoteServer, refused: Refusal, rid: str) -> None:
        """End the choice by the server's refusal, or go on elsewhere. Raises the error that ends it."""
        full = refused.status in OVERLOADED
        if refused.status == HTTPStatus.BAD_REQUEST:
            if self._text is not None:
                raise restarted("A model's server was lost, and another refused the rest of the answer.")
            self._end(refused.finish)
        elif self._carries_ids and self._begun and not full and not self._advances:
            raise restarted("The model's server cannot take the answer up again.")
        elif self._begun or self._attempts.has_moved:
            self._route.faults.fault("broke_off", server.url, rid)
            self._lost(server, f"refused with status {refused.status}", died=self._advances or not full)
        elif not full or self._route.pool.pick(self._attempts.tried) is None:
            self._end(refused.finish)

    @property
    def _advances(self) -> bool:
        """Whether the server that it was last sent to has generated anything."""
        return self._reader.advances

    async def _ask(self, server: RemoteServer, rid: str) -> None:
        """One attempt. Raises ServerGone, Refusal; returns when the choice has ended."""
        body, received = self._choice.body, self._received
        self._reader = ChoiceReader(len(body["input_ids"]))
        if self._text is not None:
            body = resumed_body(body, self._text)
            self._reader = ChoiceReader(len(body["input_ids"]))
        elif received.token_ids:
            body = carried_body(body, received.token_ids)
            num_ids = len(received.token_ids)
            self._reader = ChoiceReader(len(body["input_ids"]), num_ids, received.num_chars)
        async with server.generate({**body, "rid": rid, "stream": True}) as read:
            self._sent = server, rid
            self._attempts.accepted()
            await self._read(server, rid, read)
        server.breaker.succeeded()
        if self._reader.miscounts_prompt:
            self._route.faults.fault("wrong_count", server.url, rid)

    async def _read(self, server: RemoteServer, rid: str, read: Read) -> None:
        """Read until the choice has ended. Raises ServerGone, Refusal."""
        events = EventReader()
        try:
            while data := await read():
                payloads = events.feed(data)
                for payload in payloads:
                    if payload == DONE:
                        raise ServerGone("the answer has no end", "broke_off")
                    step = self._reader.read(payload)
                    if self._take(step, server, rid):
                        if step.finish is not None and not await _ends_here(payloads, events, read):
                            self._route.faults.fault("after_end", server.url, rid)
                        return
        except WrongCount as exc:
            raise ServerGone(str(exc), "wrong_count") from None
        except UnreadableEvent as exc:
            raise ServerGone(str(exc), "unreadable") from None
        raise ServerGone("the answer broke off", "broke_off")

    # --- the way back

    def _take(self, step: ChoiceStep, server: RemoteServer, rid: str) -> bool:
        """Hand a step on; whether it was the last. Raises Refusal for an abort that is the server's own."""
        finish = step.finish
        if finish is not None and (status := finish.get("status_code")) is not None:
            raise Refusal(int(status), str(finish.get("message") or ""))
        if step.token_ids and (lost_s := self._attempts.advanced()) is not None:
            self._leave_gate()
            waited_s = asyncio.get_running_loop().time() - lost_s
            self._route.faults.resumed(
                server.url, rid, tokens=self._counts.completion_tokens, waited_s=waited_s
            )
        if self._text is None:
            self._received.add(step.token_ids, step.text)
            self._counts = step.counts._replace(cached_tokens=self._cached(step))
            self._hand_over(step.text, step.token_ids, finish, step.logprobs)
        else:
            finish = self._continue(self._text, step)
        return finish is not None

    def _continue(self, text: ContinuedText, step: ChoiceStep) -> Finish | None:
        """Hand over what a step adds behind a cut; returns the finish, which may be before the server's."""
        finish, pieces, taken = step.finish, [], 0
        for token_id in step.token_ids:
            taken += 1
            piece, finish = text.take(token_id, step.finish if taken == len(step.token_ids) else None)
            pieces.append(piece)
            if finish is not None:
                break
        if not taken and finish is not None:
            pieces.append(text.end(finish))
        self._counts = Counts(
            self._counts.prompt_tokens, text.num_tokens, self._cached(step), text.reasoning_tokens
        )
        logprobs = None if step.logprobs is None else step.logprobs.first(taken)
        self._hand_over("".join(pieces), step.token_ids[:taken], finish, logprobs)
        return finish

    def _cached(self, step: ChoiceStep) -> int:
        if self._first_cached is not None:
            return self._first_cached
        return min(step.counts.cached_tokens, self._counts.prompt_tokens)

    async def _hand_over_again(self) -> None:
        """Hand over, token by token, what an earlier run of the server generated; it may be all there is."""
        choice = self._choice
        if not self._carries_ids:
            check_resumable(choice.body["sampling_params"])
        prompt_ids, continued = choice.body["input_ids"], choice.continued
        text, steps = await asyncio.to_thread(lambda: replay(choice.rules(), prompt_ids, continued))
        if not self._carries_ids:
            self._text = text
        for number, step in enumerate(steps, start=1):
            self._received.add((step.token_id,), step.text)
            self._counts = Counts(len(prompt_ids), number, 0, step.reasoning_tokens)
            self._hand_over(step.text, (step.token_id,), step.finish, None)
            if number % REPLAYED_AT_ONCE == 0:
                await asyncio.sleep(0)

    def _hand_over(self, text: str, token_ids: Sequence[int], finish: Finish | None, logprobs: Any) -> None:
        self._ended = finish is not None
        self._tally.add(len(token_ids))
        self._sink.take(text, token_ids, finish, self._counts, logprobs, 0)

    def _end(self, finish: Finish) -> None:
        """A last step of our own making: an abort, or what the server refused."""
        if not self._ended:
            text = "" if self._text is None else self._text.end(finish)
            self._hand_over(text, (), finish, None)

    def _fail(self, error: ServingError) -> None:
        if self._ended:
            return
        self._ended = True
        if self._begun or self._attempts.has_moved:
            self._route.faults.ended(self._choice.rid, error.code, self._choice.body["input_ids"])
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
        if self._sent is not None:
            self._route.faults.fault("abort", self._sent[0].url, self._sent[1])
        self._end(dict(ABORTED))
        assert self._running is not None
        self._running.cancel()

    async def _ends_within(self, timeout_s: float) -> bool:
        assert self._running is not None
        done, _ = await asyncio.wait([self._running], timeout=timeout_s)
        return bool(done)


async def _ends_here(payloads: Iterator[bytes], events: EventReader, read: Read) -> bool:
    """Read what follows the last event, so that the connection can be used again; whether it is nothing."""
    clean = all(payload == DONE for payload in payloads)
    with contextlib.suppress(ServerGone, TimeoutError, UnreadableEvent):
        async with asyncio.timeout(DRAIN_S):
            while data := await read():
                clean = all(payload == DONE for payload in events.feed(data)) and clean
    return clean


def _nothing() -> None:
    """Leave a gate that was not entered."""
