"""The endpoints of `/api/chat/completions`, `/v1/chat/completions` and `/v1/completions`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from app.api.openai.chat_completion import ChunkWire, completion
from app.api.openai.text_completion import CompletionWire, text_completion
from app.api.schema.chat_request import parse_chat_request
from app.api.schema.completions import parse_completion
from app.core import ChatRequest
from app.intake.endpoint import AnswerEndpoint, ParseContext, new_id


def chat_endpoint(*, store: bool, strict: bool) -> AnswerEndpoint:
    """With `store` answers are stored unless the request says no; `strict` is that of parse_chat_request."""
    prefix = "chatcmpl-"

    def parse(body: Mapping[str, Any], context: ParseContext) -> Sequence[ChatRequest]:
        return [parse_chat_request(body, new_id(prefix), store=store, strict=strict, **context._asdict())]

    return AnswerEndpoint(prefix, "chat.completion", parse, ChunkWire, lambda streams: completion(streams[0]))


def text_endpoint(*, strict: bool) -> AnswerEndpoint:
    """Prompts without a template. `strict` refuses parameters that have no effect."""
    prefix = "cmpl-"

    def parse(body: Mapping[str, Any], context: ParseContext) -> Sequence[ChatRequest]:
        make_id = partial(new_id, prefix)
        return parse_completion(body, make_id=make_id, strict=strict, **context._asdict())

    return AnswerEndpoint(prefix, CompletionWire.OBJECT, parse, CompletionWire, text_completion)
