"""The door of `/api/chat/completions` and `/v1/chat/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.openai.chat_completion import ChunkWire, completion
from app.api.schema.wire import parse_chat_request
from app.core import ChatRequest
from app.intake.door import Door, Sender, new_id

ID_PREFIX = "chatcmpl-"


def chat_door(*, store: bool, strict: bool) -> Door:
    """With `store` answers are stored unless the request says no; `strict` is that of parse_chat_request."""

    def parse(body: Mapping[str, Any], sender: Sender) -> Sequence[ChatRequest]:
        return [parse_chat_request(body, new_id(ID_PREFIX), store=store, strict=strict, **sender._asdict())]

    return Door(ID_PREFIX, "chat.completion", parse, ChunkWire, lambda streams: completion(streams[0]))
