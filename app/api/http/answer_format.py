"""The form of answers: their ids, the frames of their streams, and the JSON of an answer in one piece."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from app.api.http.completion import completion
from app.api.http.sse import ChunkWire
from app.api.http.text_completion import CompletionWire, text_completion
from app.core import ChatRequest
from app.stream.token_stream import TokenStream, Wire


class AnswerFormat(NamedTuple):
    """The form of a route's answers."""

    id_prefix: str
    """The beginning of their ids; no format's begins with another's."""
    object: str
    make_wire: Callable[[ChatRequest], Wire]
    whole: Callable[[Sequence[TokenStream]], dict[str, Any]]
    """The answer in one piece, from the finished streams of all prompts. Raises ServingError."""


CHAT_FORMAT = AnswerFormat("chatcmpl-", "chat.completion", ChunkWire, lambda streams: completion(streams[0]))
TEXT_FORMAT = AnswerFormat("cmpl-", CompletionWire.OBJECT, CompletionWire, text_completion)
