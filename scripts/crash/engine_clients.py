"""Clients of a server whose engine is killed: each hears one stream to its end, and notes the pauses."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scripts.crash.http import Answer, Connection

PATH = "/api/chat/completions"


@dataclass
class Heard:
    """What a client has of one stream, over all its connections."""

    prompt: str
    request_id: str = ""
    ids: list[int] = field(default_factory=list)
    text: dict[str, str] = field(default_factory=dict)
    finish: dict[int, str] = field(default_factory=dict)
    error: str | None = None
    error_usage: Mapping[str, Any] = field(default_factory=dict)
    """The counts that an error event tells."""
    usage: Mapping[str, Any] = field(default_factory=dict)
    done: bool = False
    longest_pause_s: float = 0.0
    """The longest time between two events."""
    drops: int = 0

    @property
    def characters(self) -> int:
        """How much of the answer has come."""
        return sum(map(len, self.text.values()))

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
        self.usage = chunk.get("usage") or self.usage
        for choice in chunk["choices"]:
            self._add_piece(choice, choice["delta"])

    def add_completion(self, completion: Mapping[str, Any]) -> None:
        """Take in an answer in one piece."""
        self.usage, self.done = completion["usage"], True
        for choice in completion["choices"]:
            self._add_piece(choice, choice["message"])

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
    """One request, and the connection it is read on."""

    def __init__(self, port: int, prompt: str, body: Mapping[str, Any]) -> None:
        self.heard = Heard(prompt)
        self._port = port
        self._body = body
        self._reading: asyncio.Task[None] | None = None
        self._last_s = 0.0

    async def run(self) -> Heard:
        """Hear the stream to its end, over as many connections as it takes."""
        while not self.heard.done and self.heard.error is None:
            self._reading = asyncio.create_task(self._read())
            await asyncio.wait([self._reading])
            if not self._reading.cancelled():
                self._reading.result()
                break
        return self.heard

    def drop(self) -> None:
        """Close the connection; the client comes back at once, and asks for what it lacks."""
        if self._reading is not None and self.heard.request_id:
            self.heard.drops += 1
            self._reading.cancel()

    async def _read(self) -> None:
        heard = self.heard
        async with await Connection.to(self._port) as connection:
            if heard.request_id:
                after = {"last-event-id": str(heard.ids[-1] if heard.ids else 0)}
                answer = await connection.ask("GET", f"{PATH}/{heard.request_id}", None, after)
            else:
                answer = await connection.ask("POST", PATH, self._body)
            if answer.status != 200:
                heard.error = f"status {answer.status}"
                return
            heard.request_id = answer.headers["x-request-id"]
            await self._hear(answer)

    async def _hear(self, answer: Answer) -> None:
        heard = self.heard
        async for event in answer.events():
            now_s = time.monotonic()
            if self._last_s:
                heard.longest_pause_s = max(heard.longest_pause_s, now_s - self._last_s)
            self._last_s = now_s
            heard.add(event.id, event.data)
