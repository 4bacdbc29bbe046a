"""The request of `/v1/completions`: a prompt without a template, and what it shares with a chat request.

A name that is not here is refused, as in a chat request: nothing is dropped in silence.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.schema.parameters import PARAMETERS, check, check_kind, check_moderation, check_values
from app.api.schema.tokens import check_token_ids
from app.api.schema.wire import stream_options
from app.core import ChatRequest, IdempotencyKey, Placement, RawPrompt
from app.errors import BadRequest, UnsupportedParameter

DEFAULT_MAX_TOKENS = 16
"""OpenAI's, and that of vLLM and SGLang."""
MAX_LOGPROBS = 20
MAX_CHOICES = 128
"""Choices of all prompts together; a chat request's."""
SHARED = (
    "model",
    "max_tokens",
    "min_tokens",
    "n",
    "stop",
    "stop_token_ids",
    "no_stop_trim",
    "ignore_eos",
    "skip_special_tokens",
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "seed",
    "response_format",
    "regex",
    "ebnf",
    "stream",
    "stream_options",
    "moderation",
    "user",
    "metadata",
    "safety_identifier",
    "prompt_cache_key",
)
"""Parameters of a chat request that mean the same here."""
OWN = ("prompt", "logprobs", "best_of", "echo", "suffix")
"""The parameters that a chat request does not have, or has with another meaning."""
REFUSED: Mapping[str, tuple[str, bool | str]] = {
    "echo": ("the prompt is not repeated in the answer, and its tokens have no logprobs", False),
    "suffix": ("no model here fills in the middle", ""),
}
"""Why they are refused, and the value that asks for nothing and passes."""


@dataclass(frozen=True, slots=True)
class CompletionRequest:
    """A checked request. `values` has the parameters that were sent, without nulls."""

    model: str
    prompts: Sequence[str | Sequence[int]]
    values: Mapping[str, Any]

    def as_chat(
        self,
        prompt: RawPrompt,
        request_id: str,
        owner: str,
        *,
        idempotency: IdempotencyKey | None = None,
        socket_wait_s: float = 0.0,
    ) -> ChatRequest:
        """The request that generates from one of the prompts."""
        values = self.values
        for_engine = {name: values[name] for name in SHARED if name in values and PARAMETERS[name].to_engine}
        for_engine["messages"] = [{"role": "user", "content": prompt.text}]
        top = values.get("logprobs")
        if top is not None:
            for_engine |= {"logprobs": True, "top_logprobs": top}
        include_usage, continuous_usage = stream_options(values)
        return ChatRequest(
            request_id=request_id,
            owner=owner,
            model=self.model,
            body=for_engine,
            created_at_unix_s=int(time.time()),
            n=values.get("n", 1),
            max_tokens=values.get("max_tokens", DEFAULT_MAX_TOKENS),
            include_usage=include_usage,
            continuous_usage=continuous_usage,
            logprobs=top is not None,
            moderated="moderation" in values,
            idempotency=idempotency,
            raw=prompt,
            placement=Placement(socket_wait_s=socket_wait_s),
        )


def parse_completion(body: Mapping[str, Any]) -> CompletionRequest:
    """The checked request. Raises BadRequest and UnsupportedParameter, naming the parameter."""
    values = {name: value for name, value in body.items() if value is not None}
    for required in ("model", "prompt"):
        if required not in values:
            raise BadRequest(f"{required} is required.", code="missing_parameter", param=required)
    for name, value in values.items():
        _check(name, value)
    stream_options(values)
    check_values({**values, "messages": []})
    if "moderation" in values:
        check_moderation(values["moderation"])
    n = values.get("n", 1)
    if values.get("best_of", n) != n:
        raise UnsupportedParameter(
            "best_of: every choice is returned; leave it out, or send n.", param="best_of"
        )
    prompts = _prompts(values["prompt"])
    if len(prompts) * n > MAX_CHOICES:
        raise BadRequest(
            f"prompt and n ask for {len(prompts) * n:,} choices, and at most {MAX_CHOICES} are generated.",
            param="prompt",
        )
    if len(prompts) > 1 and values.get("stream"):
        raise UnsupportedParameter(
            "stream: a stream has one prompt; send one request for each.", param="stream"
        )
    return CompletionRequest(values["model"], prompts, values)


def _check(name: str, value: Any) -> None:
    """Raise BadRequest or UnsupportedParameter unless the parameter may have this value."""
    if name in REFUSED:
        why, passes = REFUSED[name]
        if type(value) is not type(passes) or value != passes:
            raise UnsupportedParameter(f"{name}: {why}; remove it.", param=name)
    elif name in ("logprobs", "best_of"):
        check_kind(name, value, int)
        least, most = (0, MAX_LOGPROBS) if name == "logprobs" else (1, MAX_CHOICES)
        if not least <= value <= most:
            raise BadRequest(f"{name} must be {least} to {most}, got {value}.", param=name)
    elif name in SHARED:
        check(name, value)
    elif name != "prompt":
        _refuse(name, value)


def _refuse(name: str, value: Any) -> None:
    """Refuse a parameter of chat requests by its own reason, or as an unknown name."""
    if name in PARAMETERS and PARAMETERS[name].refusal is None:
        raise UnsupportedParameter(f"{name}: belongs to /v1/chat/completions; remove it.", param=name)
    check(name, value)


def _prompts(prompt: Any) -> Sequence[str | Sequence[int]]:
    """A text, an array of ids, or an array of either. Raises BadRequest naming the place."""
    check_kind("prompt", prompt, str, list)
    if isinstance(prompt, str) or (prompt and type(prompt[0]) is int):
        prompts, where = [prompt], ["prompt"]
    else:
        prompts, where = prompt, [f"prompt[{i}]" for i in range(min(len(prompt), MAX_CHOICES + 1))]
    if not 0 < len(prompts) <= MAX_CHOICES:
        raise BadRequest(f"prompt takes 1 to {MAX_CHOICES} prompts, got {len(prompts):,}.", param="prompt")
    for place, text_or_ids in zip(where, prompts, strict=True):
        check_kind(place, text_or_ids, str, list)
        if not text_or_ids:
            raise BadRequest(f"{place} is empty.", param=place)
        if not isinstance(text_or_ids, str):
            check_token_ids(place, text_or_ids)
    return prompts
