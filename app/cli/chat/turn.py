"""A turn: what is asked, where in the conversation, and the answer shown as it arrives."""

from __future__ import annotations

import base64
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.cli import tables
from app.cli.chat.answer import Answer, AnswerStream, Piece
from app.cli.chat.interrupts import Interrupts
from app.cli.chat.screen import Screen, remarks
from app.cli.client_options import Server
from app.errors import BadRequest

_IMAGES: Mapping[str, tuple[bytes, ...]] = {
    "png": (b"\x89PNG\r\n\x1a\n",),
    "jpeg": (b"\xff\xd8\xff",),
    "gif": (b"GIF87a", b"GIF89a"),
    "webp": (b"RIFF",),
}
"""First bytes of the image files that models read."""


@dataclass(slots=True)
class Turn:
    """New messages, none to have another answer, below `parent_id`; None leaves the place to the server."""

    messages: Sequence[Mapping[str, Any]]
    conversation_id: str | None = None
    parent_id: str | None = None

    def body(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The request, with the model and the parameters of the options."""
        places = {"conversation_id": self.conversation_id, "parent_id": self.parent_id}
        return {
            **options,
            "messages": list(self.messages),
            "stream": True,
            "stream_options": {"include_usage": True},
            **{name: value for name, value in places.items() if value is not None},
        }


@dataclass(frozen=True, slots=True)
class Outcome:
    """An answer as far as it came, and what has to be said about its end."""

    answer: Answer
    elapsed_s: float
    is_stopped: bool
    notes: Sequence[str]


def user_message(text: str, images: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A message of the user's; its images stand before its text."""
    content: Any = [*images, {"type": "text", "text": text}] if images else text
    return {"role": "user", "content": content}


def image_part(path: Path) -> dict[str, Any]:
    """A file as a part of a message. Raises BadRequest."""
    try:
        content = path.expanduser().read_bytes()
    except OSError as exc:
        raise BadRequest(f"{path} cannot be read: {exc.strerror}.") from exc
    kind = next((kind for kind, heads in _IMAGES.items() if content.startswith(heads)), None)
    if kind is None:
        raise BadRequest(f"{path} is no PNG, JPEG, WebP or GIF file.")
    url = f"data:image/{kind};base64,{base64.b64encode(content).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def _patiently(pieces: Iterator[Piece]) -> Iterator[Piece]:
    """The pieces; a terminal shows that the first is waited for."""
    with tables.working("waiting for the answer"):
        first = next(pieces, None)
    if first is not None:
        yield first
        yield from pieces


def ask(
    server: Server, screen: Screen | None, body: Mapping[str, Any] | None, answer_id: str = ""
) -> Outcome:
    """Show an answer from its first word to its end; without a screen, only read it.

    `body` None attaches to the answer of that id. Raises Unreachable, Refused, and KeyboardInterrupt at the
    second Ctrl-C.
    """
    began_s = time.monotonic()
    with Interrupts() as interrupts:
        notify = screen.notice if screen else lambda _text: None
        stream = AnswerStream(server, interrupts, body, answer_id, notify=notify)
        try:
            for piece in _patiently(stream.pieces()):
                if screen:
                    screen.show(piece)
        finally:
            if screen:
                screen.end()
    notes = remarks(stream.answer, is_stopped=stream.is_stopping)
    return Outcome(stream.answer, time.monotonic() - began_s, stream.is_stopping, notes)
