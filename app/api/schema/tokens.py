"""The bodies of `/tokenize` and `/detokenize`, checked name by name like those of a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.schema.parameters import check_kind, quoted
from app.errors import BadRequest, UnsupportedParameter, unknown_parameter

MAX_TEXTS = 1_024
"""Texts, or lists of ids, of one request."""
MAX_CHARS = 1_000_000
"""Characters of them together; a tokenizer takes some 0.4 s for as many, in a thread that renders."""
TEMPLATE = ("tools", "chat_template_kwargs", "reasoning_effort", "continue_final_message")
"""Parameters of a chat request that a template reads."""
ASKS_NOTHING: Mapping[str, bool] = {
    "add_generation_prompt": True,
    "return_token_strs": False,
    "parse_special": True,
    "with_pieces": False,
}
"""Parameters of vLLM's and llama.cpp's that are taken with this value only."""
_LLAMA_CPP: Mapping[str, str] = {"content": "prompt", "add_special": "add_special_tokens"}
"""Its names for parameters of `/tokenize`."""
_OF_TOKENIZE = frozenset(
    {"model", "prompt", "messages", "add_special_tokens", *_LLAMA_CPP, *ASKS_NOTHING, *TEMPLATE}
)
_OF_DETOKENIZE = frozenset({"model", "tokens", "skip_special_tokens"})


@dataclass(frozen=True, slots=True)
class TokenizeRequest:
    """Texts to tokenize, or a conversation to render; `messages` is checked as a chat request's."""

    model: str | None
    prompt: str | Sequence[str]
    messages: Sequence[Any] | None
    template: Mapping[str, Any]
    add_special_tokens: bool


@dataclass(frozen=True, slots=True)
class DetokenizeRequest:
    """Lists of ids; one list where the caller sent ids alone."""

    model: str | None
    tokens: Sequence[Sequence[int]]
    several: bool
    skip_special_tokens: bool


def parse_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """The request. Raises BadRequest and UnsupportedParameter, naming the parameter as it was sent."""
    values = _sent(body, _OF_TOKENIZE)
    spelled = {ours: theirs for theirs, ours in _LLAMA_CPP.items() if theirs in values}
    for ours, theirs in spelled.items():
        if ours in values:
            raise BadRequest(f"{theirs} means the same as {ours}; send one of them.", param=theirs)
        values[ours] = values.pop(theirs)
    if "prompt" in spelled:  # llama.cpp's default
        values.setdefault("add_special_tokens", False)
    try:
        return _tokenize_request(values)
    except BadRequest as error:
        error.with_caller_param(spelled)
        raise


def _tokenize_request(values: Mapping[str, Any]) -> TokenizeRequest:
    if ("prompt" in values) == ("messages" in values):
        raise BadRequest("Send either prompt or messages.", code="missing_parameter", param="prompt")
    messages = values.get("messages")
    if messages is not None:
        check_kind("messages", messages, list)
    for name, passes in ASKS_NOTHING.items():
        if name in values and values[name] is not passes:
            raise UnsupportedParameter(f"{name}: only {str(passes).lower()} is served.", param=name)
    template = {name: values[name] for name in TEMPLATE if name in values}
    if template and messages is None:
        raise BadRequest(f"{next(iter(template))} needs messages.", param=next(iter(template)))
    add = values.get("add_special_tokens", messages is None)
    check_kind("add_special_tokens", add, bool)
    if messages is not None and add:
        raise UnsupportedParameter(
            "add_special_tokens: the template writes those of messages; remove it.",
            param="add_special_tokens",
        )
    return TokenizeRequest(values.get("model"), _texts(values.get("prompt", "")), messages, template, add)


def parse_detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """The request. Raises BadRequest and UnsupportedParameter, naming the parameter."""
    values = _sent(body, _OF_DETOKENIZE)
    if "tokens" not in values:
        raise BadRequest("tokens is required.", code="missing_parameter", param="tokens")
    tokens = values["tokens"]
    check_kind("tokens", tokens, list)
    skip = values.get("skip_special_tokens", False)
    check_kind("skip_special_tokens", skip, bool)
    several = bool(tokens) and isinstance(tokens[0], list)
    lists = tokens if several else [tokens]
    _check_count("tokens", lists)
    for i, ids in enumerate(lists):
        check_token_ids(f"tokens[{i}]" if several else "tokens", ids)
    return DetokenizeRequest(values.get("model"), lists, several, skip)


def check_token_ids(where: str, ids: Any) -> None:
    """Raise BadRequest, naming the place, unless `ids` is an array of integers from 0 to 2^31 - 1."""
    check_kind(where, ids, list)
    if all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        return
    index = next(i for i, v in enumerate(ids) if not (type(v) is int and 0 <= v < 2**31))
    raise BadRequest(f"{where}[{index}] is no token id.", code="invalid_type", param=f"{where}[{index}]")


def _sent(body: Mapping[str, Any], names: frozenset[str]) -> dict[str, Any]:
    """The fields that are not null. Raises UnsupportedParameter for one that is none of `names`."""
    values = {name: value for name, value in body.items() if value is not None}
    for name in values.keys() - names:
        raise unknown_parameter(name, quoted(name))
    if "model" in values:
        check_kind("model", values["model"], str)
    return values


def _texts(prompt: Any) -> str | Sequence[str]:
    check_kind("prompt", prompt, str, list)
    if not isinstance(prompt, str):
        _check_count("prompt", prompt)
        for i, text in enumerate(prompt):
            check_kind(f"prompt[{i}]", text, str)
    num_chars = len(prompt) if isinstance(prompt, str) else sum(map(len, prompt))
    if num_chars > MAX_CHARS:
        raise BadRequest(
            f"prompt has {num_chars:,} characters, and {MAX_CHARS:,} are taken at most; send several.",
            param="prompt",
        )
    texts: str | Sequence[str] = prompt
    return texts


def _check_count(name: str, items: Sequence[Any]) -> None:
    if not 0 < len(items) <= MAX_TEXTS:
        raise BadRequest(f"{name} takes 1 to {MAX_TEXTS:,} entries, got {len(items):,}.", param=name)
