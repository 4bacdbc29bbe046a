"""`response_format`: the form that engines get, and the place that a refusal names."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.schema.formats import answer_format
from app.errors import BadRequest

SCHEMA = {"type": "object", "properties": {"strict": {"type": "boolean"}}}
FULL = {"name": "n", "schema": {}, "strict": True, "description": "d"}
NAMED = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}


@pytest.mark.parametrize(
    ("sent", "form"),
    [
        ({"type": "text"}, {"type": "text"}),
        ({"type": "json_object"}, {"type": "json_object"}),
        ({"type": "json_object", "schema": None}, {"type": "json_object"}),
        ({"type": "json_object", "schema": SCHEMA}, NAMED),
        ({"type": "json_schema", "schema": SCHEMA}, NAMED),
        ({"type": "json_schema", "json_schema": {"schema": SCHEMA}}, NAMED),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": None}},
            {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}},
        ),
        (
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {}, "strict": True, "description": "d"},
            },
            {
                "type": "json_schema",
                "json_schema": {"name": "n", "schema": {}, "strict": True, "description": "d"},
            },
        ),
        (
            {"type": "structural_tag", "format": {"type": "any_text"}},
            {"type": "structural_tag", "format": {"type": "any_text"}},
        ),
        (
            {"type": "structural_tag", "structures": [], "triggers": [], "at_least_one": True},
            {"type": "structural_tag", "structures": [], "triggers": [], "at_least_one": True},
        ),
    ],
)
def test_a_format_has_the_form_of_openai(sent: dict[str, Any], form: dict[str, Any]) -> None:
    """A schema is where OpenAI has it, nulls are gone, and nothing of a schema is touched."""
    assert answer_format(sent) == form


def schema_with(**fields: Any) -> dict[str, Any]:
    """A format with a schema, and with these fields beside it."""
    return {"type": "json_schema", "json_schema": {"schema": {}, **fields}}


@pytest.mark.parametrize(
    ("sent", "code", "param"),
    [
        ({}, "invalid_value", "type"),
        ({"type": "xml"}, "invalid_value", "type"),
        ({"type": ["text"]}, "invalid_value", "type"),
        ({"type": "text", "schema": {}}, "unknown_parameter", "schema"),
        ({"type": "text", "foo": 1}, "unknown_parameter", "foo"),
        ({"type": "json_object", "json_schema": {}}, "unknown_parameter", "json_schema"),
        ({"type": "json_object", "schema": []}, "invalid_type", "schema"),
        ({"type": "json_schema"}, "missing_parameter", "json_schema"),
        ({"type": "json_schema", "json_schema": []}, "invalid_type", "json_schema"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "missing_parameter", "json_schema.schema"),
        ({"type": "json_schema", "json_schema": {"schema": True}}, "invalid_type", "json_schema.schema"),
        (
            schema_with(foo=1),
            "unknown_parameter",
            "json_schema.foo",
        ),
        (
            schema_with(strict=1),
            "invalid_type",
            "json_schema.strict",
        ),
        (
            schema_with(name=1),
            "invalid_type",
            "json_schema.name",
        ),
        (
            schema_with() | {"schema": {}},
            "unsupported_parameter",
            "schema",
        ),
        ({"type": "structural_tag"}, "missing_parameter", "triggers"),
        ({"type": "structural_tag", "triggers": []}, "missing_parameter", "structures"),
        ({"type": "structural_tag", "format": {}, "triggers": []}, "unknown_parameter", "triggers"),
        (
            {"type": "structural_tag", "triggers": [], "structures": [{"begin": "a", "finish": "b"}]},
            "unknown_parameter",
            "structures[0].finish",
        ),
        ({"type": "structural_tag", "triggers": [], "structures": [5]}, "invalid_type", "structures[0]"),
    ],
)
def test_a_field_that_cannot_be_honoured_is_refused_by_its_place(
    sent: dict[str, Any], code: str, param: str
) -> None:
    """No field of a format is dropped in silence."""
    with pytest.raises(BadRequest) as error:
        answer_format(sent)
    assert (error.value.code, error.value.param) == (code, f"response_format.{param}")
