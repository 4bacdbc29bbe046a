"""The bodies of `/tokenize` and `/detokenize`, checked name by name like those of a chat request."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from app.api.schema.fields import ARRAY, BOOL, TEXT, Field, check_kind, check_size, read_fields
from app.api.schema.parameters import PARAMETERS
from app.errors import BadRequest, UnsupportedParameter

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
LLAMA_CPP: Mapping[str, str] = {"content": "prompt", "add_special": "add_special_tokens"}
"""Its names for parameters of `/tokenize`."""
_TEXTS = Field((str, list), min_entries=1, max_entries=MAX_TEXTS, items=TEXT)
TOKENIZE: Mapping[str, Field] = {
    "model": TEXT,
    "prompt": _TEXTS,
    "content": _TEXTS,
    "messages": PARAMETERS["messages"],
    "add_special_tokens": BOOL,
    "add_special": BOOL,
    **dict.fromkeys(ASKS_NOTHING, BOOL),
    **{name: PARAMETERS[name] for name in TEMPLATE},
}
DETOKENIZE: Mapping[str, Field] = {"model": TEXT, "tokens": ARRAY, "skip_special_tokens": BOOL}


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
    values = read_fields(body, "", TOKENIZE)
    caller_names = {ours: theirs for theirs, ours in LLAMA_CPP.items() if theirs in values}
    for ours, theirs in caller_names.items():
        if ours in values:
            raise BadRequest(f"{theirs} means the same as {ours}; send one of them.", param=theirs)
        values[ours] = values.pop(theirs)
    if "prompt" in caller_names:  # llama.cpp's default
        values.setdefault("add_special_tokens", False)
    try:
        return _tokenize_request(values)
    except BadRequest as error:
        error.with_caller_param(caller_names)
        raise


def _tokenize_request(values: Mapping[str, Any]) -> TokenizeRequest:
    if ("prompt" in values) == ("messages" in values):
        raise BadRequest("Send either prompt or messages.", code="missing_parameter", param="prompt")
    messages = values.get("messages")
    for name, passes in ASKS_NOTHING.items():
        if name in values and values[name] is not passes:
            raise UnsupportedParameter(f"{name}: only {str(passes).lower()} is served.", param=name)
    template = {name: values[name] for name in TEMPLATE if name in values}
    if template and messages is None:
        raise BadRequest(f"{next(iter(template))} needs messages.", param=next(iter(template)))
    add = values.get("add_special_tokens", messages is None)
    if messages is not None and add:
        raise UnsupportedParameter(
            "add_special_tokens: the template writes those of messages; remove it.",
            param="add_special_tokens",
        )
    return TokenizeRequest(
        values.get("model"), _checked_texts(values.get("prompt", "")), messages, template, add
    )


def parse_detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """The request. Raises BadRequest and UnsupportedParameter, naming the parameter."""
    values = read_fields(body, "", DETOKENIZE, ("tokens",))
    tokens = values["tokens"]
    several = bool(tokens) and isinstance(tokens[0], list)
    lists = tokens if several else [tokens]
    check_size("tokens", len(lists), 1, MAX_TEXTS, "entries")
    for i, ids in enumerate(lists):
        check_token_ids(f"tokens[{i}]" if several else "tokens", ids)
    return DetokenizeRequest(values.get("model"), lists, several, values.get("skip_special_tokens", False))


def check_token_ids(where: str, ids: Any) -> None:
    """Raise BadRequest, naming the place, unless `ids` is an array of integers from 0 to 2^31 - 1."""
    check_kind(where, ids, list)
    if all(type(token_id) is int and 0 <= token_id < 2**31 for token_id in ids):
        return
    index = next(i for i, v in enumerate(ids) if not (type(v) is int and 0 <= v < 2**31))
    raise BadRequest(f"{where}[{index}] is no token id.", code="invalid_type", param=f"{where}[{index}]")


def _checked_texts(prompt: str | Sequence[str]) -> str | Sequence[str]:
    """The texts. Raises BadRequest for too many characters together."""
    num_chars = len(prompt) if isinstance(prompt, str) else sum(map(len, prompt))
    if num_chars > MAX_CHARS:
        raise BadRequest(
            f"prompt has {num_chars:,} characters, and {MAX_CHARS:,} are taken at most; send several.",
            param="prompt",
        )
    return prompt
