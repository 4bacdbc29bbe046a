"""`response_format`, brought to the form that all stages read: known fields only, one place for a schema.

llama.cpp and SGLang take a schema beside the `type` too; it is moved to where OpenAI has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.schema.fields import bounded_text, fields_of, optional, required, shown
from app.errors import BadRequest, UnsupportedParameter
from app.messages import MAX_NAME_CHARS

KINDS = ("text", "json_object", "json_schema", "structural_tag")
DEFAULT_NAME = "answer"
"""The name of a schema without one. OpenAI wants a name; no model reads it."""
_WHERE = "response_format"
_FIELDS: Mapping[str, frozenset[str]] = {
    "text": frozenset({"type"}),
    "json_object": frozenset({"type", "schema"}),
    "json_schema": frozenset({"type", "schema", "json_schema"}),
}
_STRUCTURES = ("structures", "triggers", "at_least_one")


def answer_format(value: Mapping[str, Any]) -> dict[str, Any]:
    """The format of a request. Raises BadRequest and UnsupportedParameter naming the place."""
    kind = value.get("type")
    if kind not in KINDS:
        place = f"{_WHERE}.type"
        raise BadRequest(f"{place} must be one of {', '.join(KINDS)}, got {shown(kind)}.", param=place)
    if kind == "structural_tag":
        return _structural_tag(value)
    sent = fields_of(value, _WHERE, _FIELDS[kind])
    if "schema" in sent:
        if "json_schema" in sent:
            place = f"{_WHERE}.schema"
            raise UnsupportedParameter(
                f"{place}: the schema is in json_schema already; remove it.", param=place
            )
        return schema_format(required(sent, "schema", _WHERE, dict))
    if kind == "json_schema":
        return {"type": kind, "json_schema": _named_schema(required(sent, "json_schema", _WHERE, dict))}
    return sent


def schema_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The format of answers that match a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": DEFAULT_NAME, "schema": schema}}


def _named_schema(source: Any) -> dict[str, Any]:
    where = f"{_WHERE}.json_schema"
    sent = fields_of(source, where, {"name", "description", "schema", "strict"})
    return {
        "name": bounded_text(sent.get("name", DEFAULT_NAME), f"{where}.name", MAX_NAME_CHARS),
        "schema": required(sent, "schema", where, dict),
        **optional(sent, "description", where, str),
        **optional(sent, "strict", where, bool),
    }


def _structural_tag(value: Mapping[str, Any]) -> dict[str, Any]:
    if value.get("format") is not None:
        sent = fields_of(value, _WHERE, {"type", "format"})
        required(sent, "format", _WHERE, dict)
        return sent
    sent = fields_of(value, _WHERE, {"type", *_STRUCTURES})
    required(sent, "triggers", _WHERE, list)
    optional(sent, "at_least_one", _WHERE, bool)
    for number, structure in enumerate(required(sent, "structures", _WHERE, list)):
        fields_of(structure, f"{_WHERE}.structures[{number}]", {"begin", "schema", "end"})
    return sent
