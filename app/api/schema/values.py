"""Checks of a chat completion's parameters that their own fields do not say."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.schema.fields import QUOTED_CHARS, check_size, quoted
from app.api.schema.parameters import (
    MAX_ALL_BIASES,
    MAX_ALL_STOP_CHARS,
    MAX_METADATA_NAME_CHARS,
    MAX_REQUEST_PARTS,
)
from app.errors import BadRequest, UnknownModel
from app.safety.moderation import MODELS as MODERATION_MODELS


def check_values(body: Mapping[str, Any]) -> None:
    """Check names within parameters, and bounds of several together. Raises BadRequest naming the place."""
    for token_id in body.get("logit_bias", ()):
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            where = f"logit_bias.{token_id[:QUOTED_CHARS]}"
            raise BadRequest(f"{where}: keys are token ids.", param="logit_bias")
    for name in body.get("metadata", ()):
        if len(name) > MAX_METADATA_NAME_CHARS:
            raise BadRequest(
                f"metadata.{name[:MAX_METADATA_NAME_CHARS]}…: names take at most {MAX_METADATA_NAME_CHARS}"
                f" characters, got {len(name):,}.",
                param="metadata",
            )
    check_choices(body, body.get("n", 1))
    contents = (message.get("content") for message in body["messages"])
    content_parts = sum(len(content) for content in contents if isinstance(content, list))
    check_size("messages", content_parts, 0, MAX_REQUEST_PARTS, "content parts together")
    if "moderation" in body:
        check_moderation_model(body["moderation"]["model"], "moderation.model")


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


def check_moderation_model(name: str, where: str) -> None:
    """Raise UnknownModel, naming `where`, unless `name` is a moderation model."""
    if name not in MODERATION_MODELS:
        raise UnknownModel(
            f"There is no moderation model {quoted(name)} here; ask for 'omni-moderation-latest'.",
            param=where,
        )
