"""Clients of a server whose engine is killed: each receives one stream to its end, and notes the pauses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.crash.http import Answer, Connection, Gone

PATH = "/api/chat/completions"
BURST_S = 0.01
"""Seconds in which text comes that was held back, and otherwise a token or two."""
RETRY_S = 0.2
"""Seconds until a client asks a server again that is not there, or not ready."""


@dataclass
class Reply:
    """What a client has of one stream, over all its connections."""

    prompt: str
    request_id: str = ""
    ids: list[int] = field(default_factory=list)
    text: dict[str, str] = field(default_factory=dict)
    """By track: `0` is the first choice's answer, `0 reasoning` its reasoning, `0.1` its second call."""
    finish: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    error_usage: Mapping[str, Any] = field(default_factory=dict)
    """The counts that an error event tells."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False
    sent_s: float = 0.0
    first_text_s: float = 0.0
    """Seconds from the request to the first text."""
    burst_tokens: int = 0
    """The most tokens that came at once: they were held back until then."""
    longest_pause_s: float = 0.0
    """The longest time between two events."""
    drops: int = 0
    counts: dict[int, int] = field(default_factory=dict)
    """Tokens of each choice so far, as the server counts them in each event."""
    _burst_s: float = 0.0
    _before_burst: int = 0

    @property
    def characters(self) -> int:
        """How much of the answer has come."""
        return sum(map(len, self.text.values()))

    @property
    def tokens(self) -> int:
        """Tokens of the answer that have come."""
        return sum(self.counts.values())

    def add(self, event_id: int | None, data: str) -> None:
        """Take in an event."""
        if event_id is not None:
            self.ids.append(event_id)
        if data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(data)
        if "error" in chunk:
            self.error = chunk["error"]["code"]
            self.error_usage = chunk["error"].get("usage") or {}
            return
        self.usage = usage = chunk.get("usage") or self.usage
        tokens = self.tokens
        for choice in chunk["choices"]:
            self.counts[choice["index"]] = usage.get("completion_tokens", 0)
            self._add_piece(choice, choice["delta"])
        if self.text and not self.first_text_s:
            self.first_text_s = time.monotonic() - self.sent_s
        self._note_burst(tokens)

    def add_completion(self, completion: Mapping[str, Any]) -> None:
        """Take in an answer in one piece."""
        self.usage, self.done = completion["usage"], True
        for choice in completion["choices"]:
            self._add_piece(choice, choice["message"])

    def _note_burst(self, tokens_before: int) -> None:
        now_s = time.monotonic()
        if now_s - self._burst_s > BURST_S:
            self._burst_s, self._before_burst = now_s, tokens_before
        self.burst_tokens = max(self.burst_tokens, self.tokens - self._before_burst)

    def _add_piece(self, choice: Mapping[str, Any], piece: Mapping[str, Any]) -> None:
        index = choice["index"]
        self._append(f"{index}", piece.get("content") or "")
        self._append(f"{index} reasoning", piece.get("reasoning_content") or "")
        for number, call in enumerate(piece.get("tool_calls") or ()):
            self._append(f"{index}.{call.get('index', number)}", call["function"].get("arguments") or "")
        if choice["finish_reason"] is not None:
            self.finish[index] = choice["finish_reason"]

    def _append(self, track: str, piece: str) -> None:
        if piece:
            self.text[track] = self.text.get(track, "") + piece


class Client:
    """One request, and the connections it is read on.

    With `key`, an Idempotency-Key, it outlives the server: it asks until the server is there again.
    """

    def __init__(self, port: int, body: Mapping[str, Any], key: str = "") -> None:
        self.body = body
        self.reply = Reply(body["messages"][0]["content"][:60])
        self._port = port
        self._key = key
        self._reading: asyncio.Task[bool] | None = None
        self._last_s = 0.0

    async def run(self) -> Reply:
        """Receive the stream to its end, over as many connections as it takes."""
        self.reply.sent_s = time.monotonic()
        while not self.reply.done and self.reply.error is None:
            self._reading = asyncio.create_task(self._read())
            await asyncio.wait([self._reading])
            if self._reading.cancelled():  # it has dropped, and comes back at once
                continue
            try:
                if self._reading.result():
                    break
            except Gone:
                if not self._key:
                    raise
            await asyncio.sleep(RETRY_S)
        return self.reply

    async def replay(self) -> Reply:
        """All of the stream as the server has it now."""
        again = Client(self._port, self.body, self._key)
        again.reply.request_id = self.reply.request_id
        return await again.run()

    def drop(self) -> None:
        """Close the connection; the client comes back at once, and asks for what it lacks."""
        if self._reading is not None and self.reply.request_id:
            self.reply.drops += 1
            self._reading.cancel()

    async def _read(self) -> bool:
        """Read on one connection; whether the stream is over for this client. Raises one of `Gone`."""
        reply = self.reply
        async with await Connection.to(self._port) as connection:
            if reply.request_id:
                after = {"last-event-id": str(reply.ids[-1] if reply.ids else 0)}
                answer = await connection.ask("GET", f"{PATH}/{reply.request_id}", None, after)
            else:
                keyed = {"idempotency-key": self._key} if self._key else {}
                answer = await connection.ask("POST", PATH, self.body, keyed)
            if answer.status == 503 and self._key:
                return False
            if answer.status != 200:
                refusal = await answer.json()
                reply.error = f"{answer.status} {refusal['error']['code']}"
                return True
            reply.request_id = answer.headers["x-request-id"]
            await self._receive(answer)
            return reply.done or not self._key

    async def _receive(self, answer: Answer) -> None:
        reply = self.reply
        async for event in answer.events():
            now_s = time.monotonic()
            if self._last_s:
                reply.longest_pause_s = max(reply.longest_pause_s, now_s - self._last_s)
            self._last_s = now_s
            reply.add(event.id, event.data)
