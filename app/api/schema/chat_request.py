"""The chat completion request on the wire: JSON in, a checked `ChatRequest` out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from app.api.schema.aliases import translated
from app.api.schema.fields import check_kind, missing, quoted
from app.api.schema.formats import answer_format
from app.api.schema.messages import normalized
from app.api.schema.parameters import PARAMETERS, check
from app.api.schema.template_switches import check_template_switches
from app.api.schema.tools import chosen, is_forced, normalized_tools
from app.api.schema.values import check_values
from app.core import UNPLACED, ChatRequest, IdempotencyKey, Placement
from app.errors import BadRequest
from app.journal.history import new_conversation_id, new_message_id

MAX_EFFORT = 0.99
"""The largest effort that SGLang takes as a number."""
_GRAMMARS = ("regex", "ebnf", "response_format")


def parse_chat_request(
    body: Mapping[str, Any],
    request_id: str,
    owner: str,
    *,
    store: bool = False,
    strict: bool = False,
    idempotency: IdempotencyKey | None = None,
    placement: Placement = UNPLACED,
) -> ChatRequest:
    """A checked request, to be stored if it does not say so itself. Null means absent, as in OpenAI's API.

    `strict` refuses parameters that have no effect. Raises BadRequest and UnsupportedParameter, naming
    the parameter.
    """
    sent = {name: check(name, value, strict=strict) for name, value in body.items() if value is not None}
    values, caller_names = translated(sent)
    try:
        return _parsed(
            values,
            request_id=request_id,
            owner=owner,
            idempotency=idempotency,
            strict=strict,
            caller_names=caller_names,
            placement=placement,
            **_conversation(values, store=store),
        )
    except BadRequest as error:
        error.with_caller_param(caller_names)
        raise


def _parsed(values: dict[str, Any], **fields: Any) -> ChatRequest:
    """The request of parameters that have this server's names; `fields` are those of `ChatRequest`."""
    for required in ("model", "messages"):
        if required not in values:
            raise missing(required)
    for name in fields["caller_names"]:
        values[name] = check(name, values[name])
    values["messages"] = normalized(values["messages"], may_be_empty="conversation_id" in values)
    include_usage, continuous_usage = _stream_options(values)
    check_values(values)
    check_template_switches(values.get("chat_template_kwargs", {}))
    _check_generation_prompt(values)
    if values.get("top_logprobs") and not values.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    _rename_numbers(values)
    _check_form(values, fields["caller_names"])
    return ChatRequest(
        model=values["model"],
        body={name: value for name, value in values.items() if PARAMETERS[name].to_engine},
        created_at_unix_s=int(time.time()),
        n=values.get("n", 1),
        max_tokens=_max_tokens(values),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        logprobs=values.get("logprobs", False),
        moderated="moderation" in values,
        metadata=values.get("metadata", {}),
        **fields,
    )


def _rename_numbers(values: dict[str, Any]) -> None:
    """Write values as SGLang does where it spells them in another way, or leaves out their bound."""
    if values.get("top_p") == 0:
        del values["top_p"]
        values["top_k"] = 1
    elif values.get("top_k") == 0:
        values["top_k"] = -1
    effort = values.get("reasoning_effort")
    if effort == "no_think":
        values["reasoning_effort"] = "none"
    elif isinstance(effort, int | float):
        values["reasoning_effort"] = min(effort, MAX_EFFORT)


def _check_generation_prompt(values: Mapping[str, Any]) -> None:
    """`add_generation_prompt` says again, in vLLM's words, what `continue_final_message` does."""
    name, continues = "add_generation_prompt", values.get("continue_final_message", False)
    if name in values and values[name] == continues:
        wanted = "false" if continues else "true"
        raise BadRequest(
            f"{name} must be {wanted} with continue_final_message: {str(continues).lower()}.", param=name
        )


def _check_form(values: dict[str, Any], caller_names: Mapping[str, str]) -> None:
    """Check and normalise the form of the answer: tools, a tool choice, a grammar.

    Where the answer has to be a call there is no text that a response format could apply to.
    """
    if "tools" in values:
        values["tools"] = normalized_tools(values["tools"])
    if "tool_choice" in values:
        values["tool_choice"], tools = chosen(values["tool_choice"], values.get("tools", ()))
        if "tools" in values:
            values["tools"] = tools
    if "response_format" in values:
        values["response_format"] = answer_format(values["response_format"])
    kind = values.get("response_format", {}).get("type", "text")
    forced = is_forced(values.get("tool_choice"))
    if kind == "text" or (forced and kind != "structural_tag"):
        values.pop("response_format", None)
    grammars = [name for name in _GRAMMARS if name in values]
    if grammars and forced:
        raise BadRequest(
            f"{grammars[0]}: tool_choice requires a call, whose format is the tool's; remove either.",
            param=grammars[0],
        )
    if len(grammars) > 1:
        other = caller_names.get(grammars[0], grammars[0])
        raise BadRequest(
            f"{grammars[1]}: an answer has one format, and {other} gives it; remove either.",
            param=grammars[1],
        )


def _conversation(values: Mapping[str, Any], *, store: bool) -> dict[str, Any]:
    """The fields of `ChatRequest` that say where the request is stored; empty when it is not."""
    conversation_id, parent_id = values.get("conversation_id"), values.get("parent_id")
    if parent_id is not None and conversation_id is None:
        raise BadRequest("parent_id needs a conversation_id.", param="parent_id")
    if not values.get("store", store or conversation_id is not None):
        if conversation_id is not None:
            raise BadRequest("A request with a conversation_id is stored; leave store out.", param="store")
        return {}
    return {
        "conversation_id": conversation_id or new_conversation_id(),
        "new_conversation": conversation_id is None,
        "parent_id": parent_id,
        "message_id": new_message_id(),
    }


def _max_tokens(values: Mapping[str, Any]) -> int | None:
    old, new = values.get("max_tokens"), values.get("max_completion_tokens")
    if old is not None and new is not None and old != new:
        raise BadRequest(
            f"max_tokens is {old} and max_completion_tokens {new}; send one of them.",
            param="max_completion_tokens",
        )
    limit: int | None = old if new is None else new
    return limit


def _stream_options(values: Mapping[str, Any]) -> tuple[bool, bool]:
    options = values.get("stream_options")
    if options is None:
        return False, False
    if not values.get("stream"):
        raise BadRequest("stream_options needs stream: true.", param="stream_options")
    for name, value in options.items():
        if value is None or (name == "include_obfuscation" and value is False):
            continue
        if name not in ("include_usage", "continuous_usage_stats"):
            raise BadRequest(
                f"Unknown stream option {quoted(name)}; remove it.",
                code="unsupported_parameter",
                param=f"stream_options.{name[:100]}",
            )
        check_kind(f"stream_options.{name}", value, bool)
    return bool(options.get("include_usage")), bool(options.get("continuous_usage_stats"))
