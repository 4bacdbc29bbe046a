"""The door of `/v1/completions`: prompts without a template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.openai.text_completion import CompletionWire, text_completion
from app.api.schema.completions import parse_completion
from app.core import ChatRequest, RawPrompt
from app.intake.door import Door, Sender, new_id

ID_PREFIX = "cmpl-"


def text_door(*, strict: bool) -> Door:
    """`strict` refuses parameters that have no effect."""

    def parse(body: Mapping[str, Any], sender: Sender) -> Sequence[ChatRequest]:
        sent = parse_completion(body, strict=strict, **sender._asdict())
        prompts = [RawPrompt(p) if isinstance(p, str) else RawPrompt("", p) for p in sent.prompts]
        return [sent.as_chat(i, prompt, new_id(ID_PREFIX)) for i, prompt in enumerate(prompts)]

    return Door(ID_PREFIX, CompletionWire.OBJECT, parse, CompletionWire, text_completion)
