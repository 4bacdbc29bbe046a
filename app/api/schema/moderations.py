"""The body of a request for moderation: the texts to classify."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.schema.fields import TEXT, Field, check_kind, quoted, read, read_fields
from app.api.schema.values import check_moderation_model
from app.errors import BadRequest
from app.messages import content_text
from app.safety import moderation

MAX_INPUTS = 1_024
MAX_CHARS = 1_000_000
"""Characters of all inputs together; a thread screens as many in some ten seconds."""
FIELDS: Mapping[str, Field] = {
    "input": Field((str, list), min_entries=1, max_entries=MAX_INPUTS),
    "model": TEXT,
}


def parse_moderation(body: Mapping[str, Any]) -> list[str]:
    """The texts to classify. Raises BadRequest, UnknownModel, UnsupportedParameter naming the place."""
    values = read_fields(body, "", FIELDS, ("input",))
    check_moderation_model(values.get("model", moderation.MODEL), "model")
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
    if isinstance(values, str):
        return [values]
    if isinstance(values[0], dict):
        for i, content_part in enumerate(values):
            _check_part(f"input[{i}]", content_part)
        return [content_text(values)]
    return [read(text, f"input[{i}]", TEXT) for i, text in enumerate(values)]


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
