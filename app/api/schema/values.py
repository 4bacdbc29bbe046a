"""Checks of what the parameters of a chat completion hold, where a type and a range do not say it all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from app.api.schema.parameters import (
    MAX_ALL_BIASES,
    MAX_ALL_STOP_CHARS,
    MAX_METADATA_CHARS,
    MAX_METADATA_NAME_CHARS,
    MAX_REQUEST_PARTS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    QUOTED_CHARS,
    check_chars,
    check_kind,
    quoted,
)
from app.errors import BadRequest, UnknownModel, unknown_parameter
from app.safety.moderation import MODELS as MODERATION_MODELS


def check_values(body: Mapping[str, Any]) -> None:
    """Check what the parameters that are lists and maps hold. Raises BadRequest naming the place."""
    stop = body.get("stop")
    single = [] if stop is None else [("stop", stop)]
    for where, text in _items("stop", stop, MAX_STOPS) if isinstance(stop, list) else single:
        check_kind(where, text, str)
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise BadRequest(f"{where} must have 1 to {MAX_STOP_CHARS} characters.", param=where)
    for where, token_id in _items("stop_token_ids", body.get("stop_token_ids", ()), MAX_STOPS):
        check_kind(where, token_id, int)
        if not 0 <= token_id < 2**31:
            raise BadRequest(f"{where} is no token id: {token_id}.", param=where)
    for token_id, bias in body.get("logit_bias", {}).items():
        where = f"logit_bias.{token_id[:QUOTED_CHARS]}"
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            raise BadRequest(f"{where}: keys are token ids.", param="logit_bias")
        check_kind(where, bias, int, float)
        if not -100 <= bias <= 100:
            raise BadRequest(f"{where} must be -100 to 100, got {bias}.", param=where)
    for name, value in body.get("metadata", {}).items():
        where = f"metadata.{name[:MAX_METADATA_NAME_CHARS]}"
        if len(name) > MAX_METADATA_NAME_CHARS:
            raise BadRequest(
                f"{where}…: names take at most {MAX_METADATA_NAME_CHARS} characters, got {len(name):,}.",
                param="metadata",
            )
        check_kind(where, value, str)
        check_chars(where, value, MAX_METADATA_CHARS)
    check_choices(body, body.get("n", 1))
    _check_parts(body["messages"])


def check_choices(body: Mapping[str, Any], choices: int) -> None:
    """Check what an engine keeps of each choice's own, all choices together. Raises BadRequest."""
    stops = body.get("stop", ())
    chars = sum(map(len, [stops] if isinstance(stops, str) else stops))
    each = (
        ("stop", chars, "characters", MAX_ALL_STOP_CHARS),
        ("logit_bias", len(body.get("logit_bias", ())), "entries", MAX_ALL_BIASES),
    )
    for name, count, what, limit in each:
        if count * choices > limit:
            raise BadRequest(
                f"{name} has {count:,} {what} for each of {choices} choices, {count * choices:,} together;"
                f" at most {limit:,} are taken. Ask for at most {limit // count} choices, or send fewer"
                f" {what}.",
                param=name,
            )


def _check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadRequest for too many content parts; the messages were checked."""
    contents = (message.get("content") for message in messages)
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MAX_REQUEST_PARTS:
        raise BadRequest(
            f"messages take at most {MAX_REQUEST_PARTS:,} content parts together, got {parts:,}.",
            param="messages",
        )


def check_moderation(asked: Mapping[str, Any]) -> None:
    """Check the `moderation` parameter, which has a model and nothing else.

    Raises BadRequest and UnknownModel naming the place.
    """
    for name in asked.keys() - {"model"}:
        raise unknown_parameter(f"moderation.{name[:QUOTED_CHARS]}")
    if asked.get("model") is None:
        where = "moderation.model"
        raise BadRequest(f"{where} is required.", code="missing_parameter", param=where)
    check_moderation_model(asked["model"], "moderation.model")


def check_moderation_model(name: Any, where: str) -> None:
    """Raise BadRequest or UnknownModel, naming `where`, unless `name` is a moderation model."""
    check_kind(where, name, str)
    if name not in MODERATION_MODELS:
        raise UnknownModel(
            f"There is no moderation model {quoted(name)} here; ask for 'omni-moderation-latest'.",
            param=where,
        )


def _items(name: str, values: Sequence[Any], max_length: int) -> Iterator[tuple[str, Any]]:
    if len(values) > max_length:
        raise BadRequest(f"{name} takes at most {max_length} entries, got {len(values)}.", param=name)
    for i, value in enumerate(values):
        yield f"{name}[{i}]", value
