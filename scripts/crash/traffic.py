"""Twenty clients at once, and what they ask: streams start, run and end all the time.

Stored and unstored, new conversations and later turns, with and without Idempotency-Key, in one
piece, one or two choices; some clients leave, some come back, some stop their answer.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

from scripts.crash.findings import Findings
from scripts.crash.http import Answer, Connection, Gone, read
from scripts.crash.sent_request import Reply, SentRequest, WireViolation, tag
from scripts.crash.server import Server

MAX_TURNS = 5
_PAUSE_S = 0.05
_TRUTHFUL_REFUSALS = ("draining", "engine_not_ready")


@dataclass(frozen=True)
class Engine:
    """What the server runs, and what its answers are like."""

    name: str
    arguments: tuple[str, ...]
    model: str
    rate: float
    """Tokens per second of one choice, at most."""
    tokens: int
    """Where an answer ends by itself; 0 where it does not."""
    lengths: tuple[int, int]
    longest_s: float
    """How long a life may be that is killed."""

    @property
    def scripted(self) -> bool:
        return self.name == "scripted"


class Traffic:
    """The requests of all lives of the server, and what their clients received."""

    def __init__(self, engine: Engine, rng: random.Random, findings: Findings) -> None:
        self._engine = engine
        self._rng = rng
        self._findings = findings
        self._num_sent = 0
        self._turns: dict[str, int] = {}
        self.conversations: list[str] = []
        """Conversations that are at rest and can be continued."""
        self.to_continue: deque[str] = deque()
        """Those whose last turn was cut off; they come first."""
        self.to_repeat: deque[SentRequest] = deque()
        """Completed ones to send again with their key, which must find the same answer."""
        self.to_ask_anew: deque[SentRequest] = deque()
        """Interrupted ones to send again with their key, which must make another answer."""
        self.sent: list[SentRequest] = []
        """The requests sent since the last `take`."""

    def take(self) -> list[SentRequest]:
        """The requests since the last call."""
        sent, self.sent = self.sent, []
        return sent

    async def run(self, server: Server, streams: int) -> None:
        """Keep `streams` clients busy until the server is gone or refuses because it stops."""
        await asyncio.gather(*(self._client(server) for _ in range(streams)))

    async def _client(self, server: Server) -> None:
        while not server.killed_at_s:
            try:
                if self.to_repeat and self._chance(0.5):
                    await self._repeat(server.port)
                else:
                    await self._one(server)
            except Gone:
                return

    async def _one(self, server: Server) -> None:
        sent = self._next()
        sent.life = server
        self.sent.append(sent)
        try:
            await self._ask(server.port, sent)
        except WireViolation as error:
            sent.violation = str(error)
        self._rest(sent)
        if sent.refused:
            await asyncio.sleep(_PAUSE_S)

    async def _repeat(self, port: int) -> None:
        """Send a request whose answer is known again: its key must find it. Raises Gone."""
        first = self.to_repeat.popleft()
        again = _again(first)
        try:
            await self._ask(port, again)
        except Gone:
            self.to_repeat.append(first)
            raise
        except WireViolation as error:
            again.violation = str(error)
        if again.refused or again.left:
            return
        same = again.request_id == first.request_id and again.reply.text == first.reply.text
        what = "a key finds the answer that was completed before a crash"
        facts = {"id": first.request_id, "found": again.request_id, "violation": again.violation}
        self._findings.check(same and again.violation is None and again.reply.done, what, **facts)

    def _rest(self, sent: SentRequest) -> None:
        """The conversation of an answer received to its end can have another turn."""
        if sent.reply.done and sent.reply.error is None and sent.conversation_id is not None:
            self.at_rest(sent.conversation_id)

    def at_rest(self, conversation_id: str, *, first: bool = False) -> None:
        """The conversation can be continued, unless it is long enough."""
        self._turns[conversation_id] = self._turns.get(conversation_id, 0) + 1
        if first:
            self.to_continue.append(conversation_id)
        elif self._turns[conversation_id] < MAX_TURNS and conversation_id not in self.conversations:
            self.conversations.append(conversation_id)

    # What to ask

    def _next(self) -> SentRequest:
        if self.to_ask_anew and self._chance(0.5):
            return _again(self.to_ask_anew.popleft())
        if self.to_continue and self._chance(0.6):
            return self._new(self.to_continue.popleft())
        if self.conversations and self._chance(0.3):
            return self._new(self.conversations.pop(self._rng.randrange(len(self.conversations))))
        return self._new(None)

    def _new(self, conversation_id: str | None) -> SentRequest:
        number = self._num_sent = self._num_sent + 1
        stored = conversation_id is not None or self._chance(0.5)
        path = "/api" if stored or self._chance(0.25) else "/v1"
        length = self._length()
        sent = SentRequest(
            number=number,
            path=path,
            body=self._body(number, length),
            stored=stored,
            length=min(length, self._engine.tokens or length),
            scripted=self._engine.scripted,
            key=f"key-{number}" if self._chance(0.5) else None,
            continues=conversation_id,
            reply=Reply(counted=not self._engine.scripted),
        )
        if conversation_id is not None:
            sent.body["conversation_id"] = conversation_id
        if path == "/api" and not stored:
            sent.body["store"] = False
        return sent

    def _length(self) -> int:
        """Never the length at which an answer ends by itself: it would end as `stop`, not as `length`."""
        shortest, longest = self._engine.lengths
        length = self._rng.randint(shortest, longest // 6 if self._chance(0.5) else longest)
        return length + 1 if length == self._engine.tokens else length

    def _body(self, number: int, length: int) -> dict[str, Any]:
        content = " ".join([tag(number), *["word"] * (number % 97)])
        body: dict[str, Any] = {
            "model": self._engine.model,
            "messages": [{"role": "user", "content": content}],
            "max_tokens": length,
        }
        if not self._engine.scripted:
            options = {"include_usage": True, "continuous_usage_stats": True}
            return body | {"stream": True, "stream_options": options, "temperature": 0, "ignore_eos": True}
        body["seed"] = number
        if self._chance(0.1):
            body["n"] = 2
        if self._chance(0.92):
            body["stream"] = True
            if self._chance(0.4):
                body["stream_options"] = {"include_usage": True}
        return body

    def _chance(self, share: float) -> bool:
        return self._rng.random() < share

    # Asking

    async def _ask(self, port: int, sent: SentRequest) -> None:
        """Send a request and receive its answer, as far as this client reads. Raises Gone, WireViolation."""
        keyed = {"x-resume": "1"} | ({} if sent.key is None else {"idempotency-key": sent.key})
        sent.sent_at_s = time.monotonic()
        async with await Connection.to(port) as connection:
            answer = await connection.ask("POST", sent.path + "/chat/completions", sent.body, keyed)
            sent.status = answer.status
            if answer.status != 200:
                await self._refused(sent, answer)
                return
            sent.request_id = answer.headers["x-request-id"]
            self._check_place(sent, answer)
            sent.conversation_id = answer.headers.get("x-conversation-id")
            if not sent.body.get("stream"):
                _receive_whole(sent.reply, await answer.json())
                return
            left = await self._receive_stream(sent, answer)
        if left == "stop":
            async with await Connection.to(port) as connection:
                path = f"{sent.path}/chat/completions/{sent.request_id}/cancel"
                await (await connection.ask("POST", path)).json()
            sent.cancelled = True
        if left in ("stop", "return"):
            await self._resume_stream(port, sent)

    def _check_place(self, sent: SentRequest, answer: Answer) -> None:
        check = self._findings.check
        if sent.continues is not None:
            same = answer.headers.get("x-conversation-id") == sent.continues
            check(same, "a conversation goes on after a crash", id=sent.request_id)
        if sent.repeats is not None and sent.life is not None:
            another = sent.request_id != sent.repeats.request_id
            check(another, "the key of an interrupted request starts anew", id=sent.request_id)

    async def _receive_stream(self, sent: SentRequest, answer: Answer) -> str | None:
        """Receive the stream; None at its end, or how the client left it."""
        leaves_as = self._rng.choices([None, "leave", "return", "stop"], [82, 6, 6, 6])[0]
        leaves_at = self._rng.randint(0, sent.length)
        async for event in answer.events():
            sent.reply.add(event, time.monotonic())
            if leaves_as is not None and sent.reply.tokens >= leaves_at and not sent.reply.done:
                sent.left = True
                return leaves_as
        return None

    async def _resume_stream(self, port: int, sent: SentRequest) -> None:
        """Attach where the client had left."""
        await asyncio.sleep(self._rng.uniform(0, 0.3))
        path = f"{sent.path}/chat/completions/{sent.request_id}"
        back = {"accept": "text/event-stream", "last-event-id": str(sent.reply.last_id)}
        async with read(port, path, back) as answer:
            if self._findings.check(answer.status == 200, "a live stream is found again", id=sent.request_id):
                sent.left = False
                async for event in answer.events():
                    sent.reply.add(event, time.monotonic())

    async def _refused(self, sent: SentRequest, answer: Answer) -> None:
        sent.request_id = answer.headers.get("x-request-id")
        sent.refused = (await answer.json())["error"]["code"]
        what = "a request is refused only by a server that starts or stops"
        self._findings.check(
            sent.refused in _TRUTHFUL_REFUSALS,
            what,
            code=sent.refused,
            request=sent.body,
            number=sent.number,
        )


def _again(first: SentRequest) -> SentRequest:
    """The same body with the same key, from a client that knows nothing yet."""
    return SentRequest(
        number=first.number,
        path=first.path,
        body=first.body,
        stored=first.stored,
        length=first.length,
        scripted=first.scripted,
        key=first.key,
        continues=first.continues,
        repeats=first,
        reply=Reply(counted=first.reply.counted),
    )


def _receive_whole(reply: Reply, completion: dict[str, Any]) -> None:
    reply.request_id = completion["id"]
    for choice in completion["choices"]:
        reply.add_choice(choice["index"], choice["message"]["content"], choice["finish_reason"])
    reply.usage = completion["usage"]
    reply.done = True
