"""The request of `/v1/completions`: a prompt without a template, and what it shares with a chat request.

What it shares is read as a chat request's: checked, translated and refused by the same tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from app.api.schema.chat_request import parse_chat_request
from app.api.schema.fields import check_kind, check_size, missing
from app.api.schema.parameters import PARAMETERS, Parameter, check, refused
from app.api.schema.tokens import check_token_ids
from app.api.schema.values import check_choices
from app.core import UNPLACED, ChatRequest, IdempotencyKey, Placement, RawPrompt
from app.errors import BadRequest, UnsupportedParameter

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, and that of vLLM and SGLang."""
MAX_LOGPROBS = 20
MAX_CHOICES = 128
"""Choices of all prompts together; a chat request's."""
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
OWN: Mapping[str, Parameter] = {
    "prompt": Parameter((str, list)),
    "logprobs": Parameter((int,), 0, MAX_LOGPROBS),
    "best_of": Parameter((int,), 1, MAX_CHOICES),
    **refused("echo", "the prompt is not repeated in the answer, and its tokens have no logprobs", False),
    **refused("suffix", "no model here fills in the middle", ""),
}
"""The parameters that a chat request does not have, or has with another meaning."""
_CHECKED: Mapping[str, Parameter] = {
    **OWN,
    **refused(" ".join(CHAT_ONLY), "belongs to /v1/chat/completions"),
}
SHARED = tuple(name for name, p in PARAMETERS.items() if p.refusal is None and name not in (*OWN, *CHAT_ONLY))
"""Parameters of a chat request that mean the same here."""


def parse_completion(
    body: Mapping[str, Any],
    owner: str,
    *,
    make_id: Callable[[], str] = str,
    strict: bool = False,
    idempotency: IdempotencyKey | None = None,
    placement: Placement = UNPLACED,
) -> list[ChatRequest]:
    """A checked request for each prompt. Raises BadRequest and UnsupportedParameter, naming the parameter."""
    values = {name: value for name, value in body.items() if value is not None}
    if "prompt" not in values:
        raise missing("prompt")
    for name, value in values.items():
        if name in _CHECKED:
            check(name, value, table=_CHECKED)
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
    if len(prompts) > 1:
        _check_several(values, idempotency)
    if values.keys().isdisjoint(("max_tokens", "n_predict")):
        template = replace(template, max_tokens=DEFAULT_MAX_TOKENS)
    return [_with_prompt(template, i, prompts, make_id()) for i in range(len(prompts))]


def _check_several(values: Mapping[str, Any], idempotency: IdempotencyKey | None) -> None:
    """Raise BadRequest and UnsupportedParameter for what needs a single prompt."""
    if values.get("stream"):
        raise UnsupportedParameter("stream: has a single prompt; send a request for each.", param="stream")
    if values.get("moderation"):
        raise UnsupportedParameter("moderation: needs a single prompt; remove it.", param="moderation")
    if idempotency is not None:
        raise BadRequest("Idempotency-Key needs a single prompt.", param="Idempotency-Key")


def _with_prompt(
    template: ChatRequest, index: int, prompts: Sequence[str | Sequence[int]], request_id: str
) -> ChatRequest:
    """The request for one of the prompts; errors name it with its index, where there are several."""
    prompt = prompts[index]
    raw = RawPrompt(prompt) if isinstance(prompt, str) else RawPrompt("", prompt)
    where = f"prompt[{index}]" if len(prompts) > 1 else "prompt"
    body = {**template.body, "messages": [{"role": "user", "content": raw.text}]}
    caller_names = {**template.caller_names, "messages": where, "prompt": where}
    return replace(template, request_id=request_id, body=body, raw=raw, caller_names=caller_names)


def _prompts(prompt: Any) -> Sequence[str | Sequence[int]]:
    """A text, an array of ids, or an array of either. Raises BadRequest naming the place."""
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
