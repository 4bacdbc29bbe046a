"""The request of `/v1/completions`: a prompt without a template, and what it shares with a chat request.

What it shares is read as a chat request's: checked, translated and refused by the same tables.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from app.api.schema.fields import Field, check_kind, check_size, missing, read
from app.api.schema.parameters import PARAMETERS
from app.api.schema.tokens import check_token_ids
from app.api.schema.values import check_choices
from app.api.schema.wire import parse_chat_request
from app.core import UNPLACED, ChatRequest, IdempotencyKey, Placement, RawPrompt
from app.errors import BadRequest, UnsupportedParameter

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, and that of vLLM and SGLang."""
MAX_LOGPROBS = 20
MAX_CHOICES = 128
"""Choices of all prompts together; a chat request's."""
NUMBERS: Mapping[str, Field] = {
    "logprobs": Field((int,), 0, MAX_LOGPROBS),
    "best_of": Field((int,), 1, MAX_CHOICES),
}
OWN = ("prompt", "echo", "suffix", *NUMBERS)
"""The parameters that a chat request does not have, or has with another meaning."""
REFUSED: Mapping[str, tuple[str, bool | str]] = {
    "echo": ("the prompt is not repeated in the answer, and its tokens have no logprobs", False),
    "suffix": ("no model here fills in the middle", ""),
}
"""Refused parameters: the reason, and the neutral value that passes."""
CHAT_ONLY = (
    "messages",
    "max_completion_tokens",
    "top_logprobs",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "reasoning",
    "reasoning_effort",
    "separate_reasoning",
    "stream_reasoning",
    "chat_template_kwargs",
    "add_generation_prompt",
    "continue_final_message",
    "store",
    "conversation_id",
    "parent_id",
)
"""Parameters of a conversation, of its template and of the parsers of its answer."""
SHARED = tuple(name for name, p in PARAMETERS.items() if p.refusal is None and name not in (*OWN, *CHAT_ONLY))
"""Parameters of a chat request that mean the same here."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request: its prompts, and a chat request that has everything else."""

    prompts: Sequence[str | Sequence[int]]
    template: ChatRequest

    @property
    def model(self) -> str:
        """The model that is to answer."""
        return self.template.model

    def place(self, index: int) -> str:
        """The name of a prompt in errors: with its index, where there are several."""
        return f"prompt[{index}]" if len(self.prompts) > 1 else "prompt"

    def as_chat(self, index: int, prompt: RawPrompt, request_id: str) -> ChatRequest:
        """The request that generates from one of the prompts."""
        messages = [{"role": "user", "content": prompt.text}]
        body = {**self.template.body, "messages": messages}
        spelled = {**self.template.spelled, "messages": self.place(index), "prompt": self.place(index)}
        return replace(self.template, request_id=request_id, body=body, raw=prompt, spelled=spelled)


def parse_completion(
    body: Mapping[str, Any],
    owner: str,
    *,
    strict: bool = False,
    idempotency: IdempotencyKey | None = None,
    placement: Placement = UNPLACED,
) -> CompletionRequest:
    """The checked request. Raises BadRequest and UnsupportedParameter, naming the parameter."""
    values = {name: value for name, value in body.items() if value is not None}
    if "prompt" not in values:
        raise missing("prompt")
    for name, value in values.items():
        _check(name, value)
    prompts = _prompts(values["prompt"])
    chat = {name: value for name, value in values.items() if name not in OWN}
    if (top := values.get("logprobs")) is not None:
        chat |= {"logprobs": True, "top_logprobs": top}
    chat["messages"] = [{"role": "user", "content": ""}]  # the prompt takes its place
    template = parse_chat_request(
        chat, "", owner, strict=strict, idempotency=idempotency, placement=placement
    )
    n = template.n
    if values.get("best_of", n) != n:
        raise UnsupportedParameter("best_of: every choice is returned; send n.", param="best_of")
    if len(prompts) * n > MAX_CHOICES:
        raise BadRequest(
            f"prompt and n ask for {len(prompts) * n:,} choices, and at most {MAX_CHOICES} are generated.",
            param="prompt",
        )
    check_choices(template.body, len(prompts) * n)
    if len(prompts) > 1 and values.get("stream"):
        raise UnsupportedParameter("stream: has a single prompt; send a request for each.", param="stream")
    if len(prompts) > 1 and values.get("moderation"):
        raise UnsupportedParameter("moderation: needs a single prompt; remove it.", param="moderation")
    if len(prompts) > 1 and idempotency is not None:
        raise BadRequest("Idempotency-Key needs a single prompt.", param="Idempotency-Key")
    if values.keys().isdisjoint(("max_tokens", "n_predict")):
        template = replace(template, max_tokens=DEFAULT_MAX_TOKENS)
    return CompletionRequest(prompts, template)


def _check(name: str, value: Any) -> None:
    """Raise BadRequest or UnsupportedParameter for what a chat request would read in another way."""
    if name in REFUSED:
        why, passes = REFUSED[name]
        if type(value) is not type(passes) or value != passes:
            raise UnsupportedParameter(f"{name}: {why}; remove it.", param=name)
    elif name in NUMBERS:
        read(value, name, NUMBERS[name])
    elif name in CHAT_ONLY:
        raise UnsupportedParameter(f"{name}: belongs to /v1/chat/completions; remove it.", param=name)


def _prompts(prompt: Any) -> Sequence[str | Sequence[int]]:
    """A text, an array of ids, or an array of either. Raises BadRequest naming the place."""
    check_kind("prompt", prompt, str, list)
    if isinstance(prompt, str) or (prompt and type(prompt[0]) is int):
        prompts, places = [prompt], ["prompt"]
    else:
        prompts, places = prompt, [f"prompt[{i}]" for i in range(min(len(prompt), MAX_CHOICES + 1))]
    check_size("prompt", len(prompts), 1, MAX_CHOICES, "prompts")
    for where, text_or_ids in zip(places, prompts, strict=True):
        check_kind(where, text_or_ids, str, list)
        check_size(where, len(text_or_ids), 1, math.inf)
        if not isinstance(text_or_ids, str):
            check_token_ids(where, text_or_ids)
    return prompts
