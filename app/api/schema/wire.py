"""The chat completion request on the wire: JSON in, a checked `ChatRequest` out."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from app.api.schema.messages import normalized
from app.api.schema.parameters import check, check_kind, check_moderation, check_values, quoted
from app.api.schema.template_switches import check_template_switches
from app.core import ChatRequest, IdempotencyKey, Placement
from app.errors import BadRequest
from app.generation.history import new_conversation_id, new_message_id


def parse_chat_request(
    body: Mapping[str, Any],
    request_id: str,
    owner: str,
    *,
    store: bool = False,
    idempotency: IdempotencyKey | None = None,
    socket_wait_s: float = 0.0,
) -> ChatRequest:
    """A checked request, to be stored if it does not say so itself. Null means absent, as in OpenAI's API.

    Raises BadRequest and UnsupportedParameter, naming the parameter.
    """
    values = {name: value for name, value in body.items() if value is not None}
    for required in ("model", "messages"):
        if required not in values:
            raise BadRequest(f"{required} is required.", code="missing_parameter", param=required)
    for_engine = {name: value for name, value in values.items() if check(name, value).to_engine}
    place = _conversation(values, store=store)
    for_engine["messages"] = normalized(values["messages"], may_be_empty="conversation_id" in values)
    include_usage, continuous_usage = stream_options(values)
    check_values(values)
    check_template_switches(values)
    if "moderation" in values:
        check_moderation(values["moderation"])
    if values.get("top_logprobs") is not None and not values.get("logprobs"):
        raise BadRequest("top_logprobs needs logprobs: true.", param="top_logprobs")
    return ChatRequest(
        request_id=request_id,
        owner=owner,
        model=values["model"],
        body=for_engine,
        created_at_unix_s=int(time.time()),
        n=values.get("n", 1),
        max_tokens=_max_tokens(values),
        include_usage=include_usage,
        continuous_usage=continuous_usage,
        logprobs=values.get("logprobs", False),
        idempotency=idempotency,
        moderated="moderation" in values,
        placement=Placement(socket_wait_s=socket_wait_s),
        **place,
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


def stream_options(values: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether usage is asked for at the end of the stream, and with every chunk. Raises BadRequest."""
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
