"""Clients of a soak: each holds one request to its end, through whatever happens to the server meanwhile.

A client drops and returns, leaves for good, stops or deletes its answer, or asks for the same answer twice.
It waits as `Retry-After` says, and sends a request again under its Idempotency-Key.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

from scripts.crash.engine_clients import Reply
from scripts.crash.http import Answer, Connection, Gone
from scripts.crash.soak_cases import Case

Act = Literal["listen", "drop", "leave", "cancel", "delete", "repeat"]
RETURN_S = 0.25
"""Seconds until a client whose connection broke tries again."""
LONGEST_WAIT_S = 4.0
"""A client waits no longer, whatever `Retry-After` says: rounds are short. Who is early is refused again."""
MAX_ATTEMPTS = 4
SERVER_FAULTS = ("interrupted", "engine_failed", "engine_restarted")
"""Ends after which an Idempotency-Key is free again."""


class Place(Protocol):
    """Where the server is; `port` is 0 while there is none."""

    @property
    def port(self) -> int: ...


class Manner(NamedTuple):
    """How a request is sent, and what its client does once `after` characters have come."""

    path: Literal["/api", "/v1"]
    stored: bool
    streamed: bool
    act: Act = "listen"
    after: int = 0
    away_s: float = 0.0
    repeats_at_end: bool = False


@dataclass(eq=False)
class Story:
    """One request, and all that its client knows of it."""

    case: Case
    manner: Manner
    key: str | None
    began_s: float = 0.0
    ended_s: float = 0.0
    attempts: list[Reply] = field(default_factory=list)
    """The answers that were begun; after an end by a fault of the server the same key makes another."""
    again: list[Reply] = field(default_factory=list)
    """What others received who sent the same request with the same key, to the end."""
    refusals: Counter[str] = field(default_factory=Counter)
    refused_ids: list[str] = field(default_factory=list)
    conversation_id: str | None = None
    left: bool = False
    stopped: bool = False
    """Whether the server said that it stopped the answer."""
    tried_to_stop: bool = False
    deleted: bool = False
    unknown: bool = False
    """Whether the client cannot know if its request was taken."""
    is_lost: bool = False
    """Whether the server no longer knew a stream that it had begun."""
    longest_wait_s: float = 0.0
    faults: list[str] = field(default_factory=list)
    """What no server may do, as the client saw it."""

    @property
    def reply(self) -> Reply:
        return self.attempts[-1]


class _Dropped(Exception):
    """The client closes its connection, and will be back."""


class SoakClient:
    """One request on its way."""

    def __init__(
        self, place: Place, story: Story, headers: Mapping[str, str], *, conversation_id: str | None = None
    ) -> None:
        self._place = place
        self.story = story
        self._headers = dict(headers)
        self._is_over = False
        self._is_sent = False
        self._has_acted = story.manner.act == "listen"
        self._reply = Reply(story.case.name)
        self._twin: asyncio.Task[None] | None = None
        self._body: dict[str, Any] = dict(story.case.body)
        manner = story.manner
        if manner.streamed:
            self._body |= {"stream": True, "stream_options": {"include_usage": True}}
        if manner.stored != (manner.path == "/api"):
            self._body["store"] = manner.stored
        if conversation_id is not None:
            self._body["conversation_id"] = conversation_id
        self._path = f"{manner.path}/chat/completions"

    async def run(self) -> Story:
        """Hold the request to its end."""
        story = self.story
        story.began_s = time.monotonic()
        await self._hold()
        if self._twin is not None:
            await self._twin
        if story.manner.repeats_at_end and story.attempts and self._is_complete(story.reply):
            await self._repeat()
        story.ended_s = time.monotonic()
        return story

    async def _hold(self) -> None:
        story = self.story
        while not self._is_over:
            try:
                async with asyncio.timeout(self._patience_s):
                    await self._once()
            except TimeoutError:
                story.left = self._is_over = True
                story.unknown = story.key is None
            except _Dropped:
                await asyncio.sleep(story.manner.away_s)
            except Gone:
                if self._is_sent and story.key is None and not self._reply.request_id:
                    story.unknown = True
                    break
                await asyncio.sleep(RETURN_S)

    def _is_complete(self, reply: Reply) -> bool:
        return reply.done and reply.error is None and not self.story.deleted and self.story.key is not None

    async def _connect(self) -> Connection:
        """A connection to the server. Raises one of `Gone`."""
        if not self._place.port:
            raise ConnectionRefusedError
        return await Connection.to(self._place.port)

    async def _once(self) -> None:
        """Send the request, or return to its stream; receive what comes. Raises one of `Gone`, _Dropped."""
        reply, story = self._reply, self.story
        async with await self._connect() as connection:
            if reply.request_id and story.manner.streamed:
                back = {
                    "last-event-id": str(reply.ids[-1] if reply.ids else 0),
                    "accept": "text/event-stream",
                }
                answer = await connection.ask(
                    "GET", f"{self._path}/{reply.request_id}", None, self._headers | back
                )
            else:
                self._is_sent = True
                answer = await connection.ask("POST", self._path, self._body, self._keyed())
            if answer.status != 200:
                await self._refused(answer)
                return
            self._begun(answer)
            if story.manner.streamed:
                await self._receive(answer)
            else:
                await self._receive_whole(answer)

    def _keyed(self) -> dict[str, str]:
        key, returns = self.story.key, self.story.manner.act != "leave"
        signs = ({"x-resume": "1"} if returns else {}) | ({} if key is None else {"idempotency-key": key})
        return self._headers | signs

    def _begun(self, answer: Answer) -> None:
        reply, story = self._reply, self.story
        request_id = answer.headers["x-request-id"]
        if reply.request_id and reply.request_id != request_id:
            story.faults.append(f"returned to {reply.request_id}, found {request_id}")
        elif not reply.request_id and any(request_id == earlier.request_id for earlier in story.attempts):
            story.faults.append("a key finds an answer that a fault of the server ended")
        reply.request_id = request_id
        story.conversation_id = answer.headers.get("x-conversation-id") or story.conversation_id
        if reply not in story.attempts:
            story.attempts.append(reply)

    @property
    def _patience_s(self) -> float | None:
        """After how long a client leaves that waits for an answer in one piece; None is never."""
        manner = self.story.manner
        return manner.away_s if manner.act == "leave" and not manner.streamed else None

    async def _receive_whole(self, answer: Answer) -> None:
        self._reply.add_completion(await answer.json())
        self._is_over = True

    async def _receive(self, answer: Answer) -> None:
        """Receive a stream. Raises one of `Gone` where it is cut before its end."""
        reply, story, last_s = self._reply, self.story, time.monotonic()
        async for event in answer.events():
            now_s = time.monotonic()
            story.longest_wait_s, last_s = max(story.longest_wait_s, now_s - last_s), now_s
            if reply.done:
                story.faults.append("an event after [DONE]")
            reply.add(event.id, event.data)
            if not self._has_acted and reply.characters >= story.manner.after:
                self._has_acted = True
                await self._act()
                if self._is_over:
                    return
        if not reply.done:
            raise ConnectionResetError
        if reply.error in SERVER_FAULTS and story.key is not None and len(story.attempts) < MAX_ATTEMPTS:
            self._reply = Reply(story.case.name)
        else:
            self._is_over = True

    async def _act(self) -> None:
        match self.story.manner.act:
            case "drop":
                raise _Dropped
            case "leave":
                self.story.left = self._is_over = True
            case "repeat" if self.story.key is not None:
                self._twin = asyncio.create_task(self._repeat())
            case "cancel" | "delete":
                await self._stop()

    async def _repeat(self) -> None:
        """Send the same request under the same key once more; it is given up where the server goes away."""
        twin = Reply(self.story.case.name)
        try:
            async with await self._connect() as connection:
                answer = await connection.ask("POST", self._path, self._body, self._keyed())
                if answer.status != 200:
                    return
                twin.request_id = answer.headers["x-request-id"]
                if self.story.manner.streamed:
                    async for event in answer.events():
                        twin.add(event.id, event.data)
                else:
                    twin.add_completion(await answer.json())
        except Gone:
            return
        if twin.done:
            self.story.again.append(twin)

    async def _stop(self) -> None:
        """Stop the answer, or stop and delete it, however often it takes to reach a server."""
        story, is_deletion = self.story, self.story.manner.act == "delete"
        story.tried_to_stop = True
        path = f"{self._path}/{self._reply.request_id}"
        while True:
            try:
                async with await self._connect() as connection:
                    request = ("DELETE", path) if is_deletion else ("POST", f"{path}/cancel")
                    answer = await connection.ask(*request, None, self._headers)
                    body = await answer.json()
            except Gone:
                await asyncio.sleep(RETURN_S)
                continue
            if answer.status in (429, 503):
                await self._wait(answer)
                continue
            if answer.status != 200:
                story.faults.append(f"stopping it: {answer.status} {body}")
            elif is_deletion and story.manner.path == "/v1":
                story.deleted = True
            else:
                story.stopped = bool(body.get("cancelled"))
            return

    async def _refused(self, answer: Answer) -> None:
        """Take in a refusal: wait, or give up."""
        story, reply = self.story, self._reply
        body = await answer.json()
        code = "" if body is None else body["error"]["code"]
        story.refusals[f"{answer.status} {code}"] += 1
        if answer.status in (429, 503):
            if answer.headers.get("x-request-id"):
                story.refused_ids.append(answer.headers["x-request-id"])
            if story.key is None and not story.manner.streamed and code == "draining":
                self._is_over = True  # it may be suspended, and another without a key is another
            await self._wait(answer)
        elif code == "conversation_busy":
            await asyncio.sleep(RETURN_S)
        elif answer.status == 404 and reply.request_id:
            story.is_lost = not story.deleted
            self._is_over = True
        else:
            if not (story.case.blocked and code == "content_filter"):
                story.faults.append(f"{answer.status} {json.dumps(body)[:300]}")
            self._is_over = True

    async def _wait(self, answer: Answer) -> None:
        retry_after = answer.headers.get("retry-after")
        if retry_after is None:
            self.story.faults.append(f"{answer.status} without Retry-After")
        await asyncio.sleep(min(float(retry_after or 1), LONGEST_WAIT_S))
