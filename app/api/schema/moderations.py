"""The body of a request for moderation: the texts to classify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.schema.parameters import check_kind, quoted
from app.api.schema.values import check_moderation_model
from app.errors import BadRequest, unknown_parameter
from app.messages import content_text
from app.safety import moderation

MAX_INPUTS = 1_024
MAX_CHARS = 1_000_000
"""Characters of all inputs together; a thread screens as many in some ten seconds."""


def parse_moderation(body: Mapping[str, Any]) -> list[str]:
    """The texts to classify. Raises BadRequest, UnknownModel, UnsupportedParameter naming the place."""
    values = {name: value for name, value in body.items() if value is not None}
    for name in values.keys() - {"input", "model"}:
        raise unknown_parameter(name, quoted(name))
    check_moderation_model(values.get("model", moderation.MODEL), "model")
    if "input" not in values:
        raise BadRequest("input is required.", code="missing_parameter", param="input")
    texts = _texts(values["input"])
    total = sum(map(len, texts))
    if total > MAX_CHARS:
        raise BadRequest(
            f"input has {total:,} characters, and at most {MAX_CHARS:,} are taken; send several requests.",
            param="input",
        )
    return texts


def _texts(values: Any) -> list[str]:
    """A string, an array of them, or the parts of one message, which are one text."""
    check_kind("input", values, str, list)
    if isinstance(values, str):
        return [values]
    if not values:
        raise BadRequest("input must hold at least one text.", param="input")
    if len(values) > MAX_INPUTS:
        raise BadRequest(f"input takes at most {MAX_INPUTS:,} entries, got {len(values):,}.", param="input")
    if isinstance(values[0], dict):
        for i, content_part in enumerate(values):
            _check_part(f"input[{i}]", content_part)
        return [content_text(values)]
    for i, text in enumerate(values):
        check_kind(f"input[{i}]", text, str)
    return list(values)


def _check_part(where: str, content_part: Any) -> None:
    """Raise BadRequest for a part that is no text."""
    check_kind(where, content_part, dict)
    check_kind(f"{where}.type", content_part.get("type"), str)
    if content_part["type"] != "text":
        raise BadRequest(
            f"{where}.type is {quoted(content_part['type'])}: this server classifies text, and no images;"
            " send text parts.",
            code="unsupported_content",
            param=f"{where}.type",
        )
    check_kind(f"{where}.text", content_part.get("text"), str)
