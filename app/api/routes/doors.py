"""The doors of `/api/chat/completions`, `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.openai.chat_completion import ChunkWire, completion
from app.api.openai.text_completion import CompletionWire, text_completion
from app.api.schema.completions import parse_completion
from app.api.schema.wire import parse_chat_request
from app.core import ChatRequest, RawPrompt
from app.intake.door import Door, Sender, new_id


def chat_door(*, store: bool, strict: bool) -> Door:
    """With `store` answers are stored unless the request says no; `strict` is that of parse_chat_request."""
    prefix = "chatcmpl-"

    def parse(body: Mapping[str, Any], sender: Sender) -> Sequence[ChatRequest]:
        return [parse_chat_request(body, new_id(prefix), store=store, strict=strict, **sender._asdict())]

    return Door(prefix, "chat.completion", parse, ChunkWire, lambda streams: completion(streams[0]))


def text_door(*, strict: bool) -> Door:
    """Prompts without a template. `strict` refuses parameters that have no effect."""
    prefix = "cmpl-"

    def parse(body: Mapping[str, Any], sender: Sender) -> Sequence[ChatRequest]:
        sent = parse_completion(body, strict=strict, **sender._asdict())
        prompts = [RawPrompt(p) if isinstance(p, str) else RawPrompt("", p) for p in sent.prompts]
        return [sent.as_chat(i, prompt, new_id(prefix)) for i, prompt in enumerate(prompts)]

    return Door(prefix, CompletionWire.OBJECT, parse, CompletionWire, text_completion)
