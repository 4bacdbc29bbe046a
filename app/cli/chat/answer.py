"""An answer as it arrives, over as many connections as it takes: from the last event id on, nothing twice."""

from __future__ import annotations

import http.client
import json
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from app.cli.chat.interrupts import Interrupts
from app.cli.client_options import NoServer, Refused, Server, Unreachable, Unreadable

PATH = "/api/chat/completions"
SILENCE_S = 60.0
"""Longest wait for a byte: four heartbeats. A connection that is silent for longer is made anew."""
GIVE_UP_S = 600.0
"""Seconds without an event or a heartbeat: as long as a server keeps a suspended answer by default."""
_MAX_UNASKED = 30
"""Failures in a row, about a minute, before the server has said anything: it may be no server of ours."""
_CANCEL_TIMEOUT_S = 5.0
_PAUSES_S = (0.0, 0.25, 0.5, 1.0, 2.0)
_MAX_RETRY_AFTER_S = 120
_BAD_GATEWAY = (502, 504)
_NOT_FOUND = 404
_NO_CONTENT = 204


Channel = Literal["content", "reasoning"]


class Piece(NamedTuple):
    """New text of an answer."""

    channel: Channel
    text: str


@dataclass(slots=True)
class Answer:
    """What has arrived of an answer."""

    id: str = ""
    last_event_id: int = 0
    conversation_id: str | None = None
    message_id: str | None = None
    model: str = ""
    finish_reason: str | None = None
    usage: Mapping[str, Any] | None = None
    moderation: Mapping[str, Any] | None = None
    error: Mapping[str, Any] | None = None
    remarks: list[str] = field(default_factory=list)
    """What the server says about the end: a budget that is used up, a client that came back too late."""
    done: bool = False
    reconnects: int = 0
    _texts: dict[Channel, list[str]] = field(default_factory=lambda: {"content": [], "reasoning": []})

    @property
    def content(self) -> str:
        """The text of the answer."""
        return "".join(self._texts["content"])

    @property
    def reasoning(self) -> str:
        """What the model thought."""
        return "".join(self._texts["reasoning"])

    @property
    def is_whole(self) -> bool:
        """False if the policy, an error or the server ended it early."""
        return (
            self.done and self.error is None and not self.remarks and self.finish_reason != "content_filter"
        )

    def opened(self, answer_id: str) -> None:
        """A connection has headers, which name the answer."""
        self.id = answer_id
        self.reconnects += self.last_event_id > 0

    def forgotten(self) -> None:
        """The server does not know the answer, nothing of which has arrived."""
        self.id = ""

    def ended(self) -> None:
        """There are no more events."""
        self.done = True

    def take(self, event_id: int, data: bytes) -> Iterator[Piece]:
        """Take in an event; gives the text that it adds."""
        self.last_event_id = event_id
        if data == b"[DONE]":
            self.ended()
            return
        yield from self._add(json.loads(data))

    def _add(self, chunk: Mapping[str, Any]) -> Iterator[Piece]:
        self.error = chunk.get("error") or self.error
        self.model = chunk.get("model") or self.model
        self.conversation_id = chunk.get("conversation_id") or self.conversation_id
        self.message_id = chunk.get("message_id") or self.message_id
        self.usage = chunk.get("usage") or self.usage
        self.moderation = chunk.get("moderation") or self.moderation
        for name in ("budget", "abandoned"):
            if name in chunk:
                self.remarks.append(str(chunk[name].get("message")))
        for choice in chunk.get("choices", ()):
            if choice["index"] == 0:
                self.finish_reason = choice["finish_reason"] or self.finish_reason
                yield from self._text(choice["delta"])

    def _text(self, delta: Mapping[str, Any]) -> Iterator[Piece]:
        channels: Sequence[tuple[Channel, str]] = (("reasoning", "reasoning_content"), ("content", "content"))
        for channel, name in channels:
            if text := delta.get(name):
                self._texts[channel].append(text)
                yield Piece(channel, text)


class AnswerStream:
    """Asks for an answer, or attaches to one (`body` None), and reads it to its end, whatever breaks between.

    Ctrl-C cancels the answer at the server, whose end is then read; a second one is raised.
    """

    def __init__(
        self,
        server: Server,
        interrupts: Interrupts,
        body: Mapping[str, Any] | None,
        answer_id: str = "",
        *,
        notify: Callable[[str], None] = lambda _text: None,
    ) -> None:
        self.answer = Answer(answer_id)
        self.is_stopping = False
        self._server = server
        self._interrupts = interrupts
        self._body = body
        self._key = uuid.uuid4().hex
        self._notify = notify
        self._pause_s = 0.0
        self._failures = 0
        self._refusal: Refused | None = None
        """The refusal after which a later try is waited for; nothing is to be stopped then."""
        self._announced = ""
        self._give_up_at_s = time.monotonic() + GIVE_UP_S

    def pieces(self) -> Iterator[Piece]:
        """The text as it arrives. Raises as `Server.open` does, and KeyboardInterrupt at a second Ctrl-C."""
        while not self.answer.done:
            try:
                yield from self._attempt()
            except KeyboardInterrupt:
                if self.is_stopping:
                    raise
                if self._refusal is not None:
                    raise self._refusal from None
                self.is_stopping = True
            except Refused as exc:
                self._wait_or_raise(exc)
            except (Unreachable, OSError, http.client.HTTPException) as exc:
                self._reconnect_or_raise(exc)

    def _attempt(self) -> Iterator[Piece]:
        with self._interrupts.waiting():
            time.sleep(self._pause_s)
            self._refusal = None
            response = self._open()
        with closing(response):
            if response.status == _NO_CONTENT:
                self.answer.ended()
                return
            if "text/event-stream" not in response.headers.get("content-type", ""):
                raise Unreadable
            self.answer.opened(response.headers["x-request-id"])
            if self.is_stopping:
                self._server.call("POST", f"{PATH}/{self.answer.id}/cancel", timeout_s=_CANCEL_TIMEOUT_S)
            yield from self._read(response)

    def _open(self) -> http.client.HTTPResponse:
        headers = {"Accept": "text/event-stream"}
        if not self.answer.id:
            headers["Idempotency-Key"] = self._key
            return self._server.open("POST", PATH, self._body, headers, timeout_s=SILENCE_S)
        headers["Last-Event-ID"] = str(self.answer.last_event_id)
        return self._server.open("GET", f"{PATH}/{self.answer.id}", None, headers, timeout_s=SILENCE_S)

    def _read(self, response: http.client.HTTPResponse) -> Iterator[Piece]:
        """The text of a connection's events. Raises Unreachable where it ends before the answer."""
        event_id = self.answer.last_event_id
        while not self.answer.done:
            with self._interrupts.waiting():
                line = response.readline()
            if not line.endswith(b"\n"):
                raise Unreachable("The connection was lost.")
            self._give_up_at_s = time.monotonic() + GIVE_UP_S
            name, _, value = line.strip().partition(b": ")
            try:
                if name == b"id":
                    event_id = int(value)
                elif name == b"data":
                    self._is_in_contact()
                    yield from self.answer.take(event_id, value)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
                raise Unreadable from exc

    def _is_in_contact(self) -> None:
        if self._announced:
            self._notify("The server answers again.")
        self._announced, self._pause_s, self._failures = "", 0.0, 0

    def _wait_or_raise(self, refused: Refused) -> None:
        """Set the pause before the next try. Raises the refusal if no try may succeed."""
        if refused.status in _BAD_GATEWAY:
            self._reconnect_or_raise(refused)
        elif refused.status == _NOT_FOUND and self._body and self.answer.id and not self.answer.last_event_id:
            self.answer.forgotten()  # the server was killed before it wrote anything down: ask again
            self._reconnect_or_raise(refused)
        elif refused.retry_after_s is None or refused.retry_after_s > _MAX_RETRY_AFTER_S:
            raise refused
        else:
            self._refusal = None if self.answer.id else refused
            if time.monotonic() > self._give_up_at_s:
                raise refused
            retry_after_s = float(max(refused.retry_after_s, 1))
            self._pause_s = min(retry_after_s, _PAUSES_S[-1]) if self.answer.id else retry_after_s
            self._announce(f"{refused.message} Waiting; Ctrl-C ends the wait.", refused.code)

    def _reconnect_or_raise(self, cause: Exception) -> None:
        """Set the pause before the next connection. Raises Unreachable if there is no hope of one."""
        if not self.answer.id:
            was_asked = self._failures or self._announced
            if self._failures >= _MAX_UNASKED or (isinstance(cause, NoServer) and not was_asked):
                raise cause
        elif self.is_stopping and self._failures:
            raise Unreachable(
                "The server cannot be reached to stop the answer, which ends by itself after you have left."
            ) from cause
        elif time.monotonic() > self._give_up_at_s:
            raise Unreachable(
                f"The server has been away for {GIVE_UP_S / 60:.0f} minutes. When it is back,"
                " `tokenring chat --continue` shows what there is of the answer."
            ) from cause
        self._pause_s = _PAUSES_S[min(self._failures, len(_PAUSES_S) - 1)]
        self._failures += 1
        self._announce("The connection was lost; reconnecting. Ctrl-C stops the answer.", "lost")

    def _announce(self, text: str, reason: str) -> None:
        """Say why nothing arrives, once for each reason."""
        if self._announced != reason:
            self._notify(text)
        self._announced = reason
