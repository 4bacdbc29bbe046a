"""`response_format`, brought to the form that all stages read: known fields only, one place for a schema.

llama.cpp and SGLang take a schema beside the `type` too; it is moved to where OpenAI has it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.api.schema.fields import ARRAY, BOOL, OBJECT, TEXT, Field, missing, not_among, read_fields
from app.errors import UnsupportedParameter
from app.messages import MAX_NAME_CHARS

DEFAULT_NAME = "answer"
"""The name of a schema without one. OpenAI wants a name; no model reads it."""
_NAMED_SCHEMA = Field(
    (dict,),
    fields={
        "name": Field((str,), max_chars=MAX_NAME_CHARS),
        "description": TEXT,
        "schema": OBJECT,
        "strict": BOOL,
    },
    required=("schema",),
)
_STRUCTURE = Field((dict,), fields={"begin": TEXT, "schema": OBJECT, "end": TEXT})
FORMATS: Mapping[str, Mapping[str, Field]] = {
    "text": {"type": TEXT},
    "json_object": {"type": TEXT, "schema": OBJECT},
    "json_schema": {"type": TEXT, "schema": OBJECT, "json_schema": _NAMED_SCHEMA},
    "structural_tag": {
        "type": TEXT,
        "structures": Field((list,), items=_STRUCTURE),
        "triggers": ARRAY,
        "at_least_one": BOOL,
    },
}
"""The fields of each type."""
_NEWER_TAG: Mapping[str, Field] = {"type": TEXT, "format": OBJECT}
"""A structural tag that has a `format`."""


def answer_format(value: Mapping[str, Any]) -> dict[str, Any]:
    """The format of a request. Raises BadRequest and UnsupportedParameter naming the place."""
    kind = value.get("type")
    if not isinstance(kind, str) or kind not in FORMATS:
        raise not_among("response_format.type", kind, FORMATS)
    if kind == "structural_tag":
        if value.get("format") is not None:
            return read_fields(value, "response_format", _NEWER_TAG)
        return read_fields(value, "response_format", FORMATS[kind], ("triggers", "structures"))
    sent = read_fields(value, "response_format", FORMATS[kind])
    if "schema" in sent:
        if "json_schema" in sent:
            where = "response_format.schema"
            raise UnsupportedParameter(
                f"{where}: the schema is in json_schema already; remove it.", param=where
            )
        return schema_format(sent["schema"])
    if kind == "json_schema":
        if "json_schema" not in sent:
            raise missing("response_format.json_schema")
        return {"type": kind, "json_schema": {"name": DEFAULT_NAME, **sent["json_schema"]}}
    return sent


def schema_format(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The format of answers that match a JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": DEFAULT_NAME, "schema": schema}}
