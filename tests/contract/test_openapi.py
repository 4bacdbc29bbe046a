"""/openapi.json says what the server does: its routes, parameters, bounds and errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib import metadata
from typing import Any

import pytest
from jsonschema import Draft202012Validator  # type: ignore[import-untyped]  # stubs only for this

from app.api.schema.chat_request import parse_chat_request
from app.api.schema.key_terms import NULLABLE, TERMS
from app.api.schema.parameters import PARAMETERS
from app.core import ChatRequest
from app.errors import CODES, BadRequest, ServingError, UnsupportedParameter
from scripts.api_document.document import BODIES, HEADERS, OPERATIONS, QUERY, document
from tests.support.servers import Serve, chat

DOCUMENT = document()
CHAT = BODIES["ChatRequest"]["properties"]
OTHER_TYPES = {"string": "text", "integer": 1, "number": 0.5, "boolean": True, "array": [], "object": {}}
BESIDE: dict[str, dict[str, Any]] = {
    "stream_options": {"stream": True},
    "top_logprobs": {"logprobs": True},
    "parent_id": {"conversation_id": "conv_1"},
    "tool_choice": {"tools": [{"type": "function", "function": {"name": "f"}}]},
}
"""What else a parameter needs."""
VALID: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hello"}],
    "stop": ["a"],
    "moderation": {"model": "omni-moderation-latest"},
    "reasoning_effort": "low",
    "response_format": {"type": "json_object"},
    "tool_choice": "required",
    "guided_json": '{"type": "object"}',
    "guided_choice": ["yes", "no"],
    "structured_outputs": {"regex": "[ab]"},
}
"""A value of those that an empty one of their type is not."""


def types_of(schema: dict[str, Any]) -> list[str]:
    """The JSON types that a schema names, one or several."""
    return [schema["type"]] if isinstance(schema["type"], str) else schema["type"]


def within(name: str) -> Iterator[Any]:
    """Values that the document allows."""
    schema = CHAT[name]
    if "enum" in schema:
        yield from schema["enum"]
        return
    yield from (schema[bound] for bound in ("minimum", "maximum") if bound in schema)
    if name in VALID:
        yield VALID[name]
    elif "minimum" not in schema:
        yield from (OTHER_TYPES[kind] for kind in types_of(schema) if kind != "null")
    yield from [None] if "null" in types_of(schema) else []


def outside(name: str) -> Iterator[Any]:
    """Values that the document does not allow."""
    schema = CHAT[name]
    if "minimum" in schema:
        yield schema["minimum"] - 1
    if "maximum" in schema:
        yield schema["maximum"] + 1
    yield from (value for value in OTHER_TYPES.values() if not Draft202012Validator(schema).is_valid(value))


def read(name: str, value: Any) -> ChatRequest:
    """The request with that parameter, as the server reads it."""
    body = chat() | BESIDE.get(name, {}) | {name: value}
    return parse_chat_request(body, "chatcmpl-1", "local")


def test_every_route_is_described():
    """The document has each route and method of the application, and no other."""
    described = {(m.upper(), path) for path, methods in DOCUMENT["paths"].items() for m in methods}
    assert described == set(OPERATIONS)


async def test_the_application_has_these_routes(serve: Serve):
    """What is served is what is described; the document needs no key, and HEAD answers too."""
    served = await serve(api_key="secret")
    routes = {
        (m, r.path.replace(":path", "")) for r in served.starlette.routes for m in r.methods if m != "HEAD"
    }
    assert routes == set(OPERATIONS)
    answer = await served.call("GET", "/openapi.json")
    described = json.loads(json.dumps(DOCUMENT))
    described["info"]["version"] = metadata.version("tokenring")
    assert (answer.status, answer.json()) == (200, described)
    assert "max-age" in answer.headers["cache-control"]
    assert (await served.call("HEAD", "/openapi.json")).status == 200


def test_schemas_are_schemas_and_references_lead_somewhere():
    """Each schema is JSON Schema 2020-12, and each `$ref` names a part of the document."""
    text = json.dumps(DOCUMENT)
    for schema in DOCUMENT["components"]["schemas"].values():
        Draft202012Validator.check_schema(schema)
    for reference in {part.split('"')[0] for part in text.split('"$ref": "#/')[1:]}:
        place: Any = DOCUMENT
        for name in reference.split("/"):
            place = place[name]
    ids = [o["operationId"] for path in DOCUMENT["paths"].values() for o in path.values()]
    assert len(ids) == len(set(ids))


def test_every_parameter_is_described_by_the_table():
    """A chat request has each parameter of the table with what becomes of it; a key has each of its terms."""
    assert set(CHAT) == set(PARAMETERS)
    for name, schema in CHAT.items():
        assert schema["x-tokenring-treatment"] == PARAMETERS[name].treatment
    changed = BODIES["ChangedKey"]["properties"]
    assert set(changed) == set(TERMS)
    assert {n for n, s in changed.items() if "null" in s.get("type", ())} == set(NULLABLE)


def test_every_query_parameter_and_header_is_used():
    """No name is described that no route takes."""
    assert {name for operation in OPERATIONS.values() for name in operation.query} == set(QUERY)
    assert {name for operation in OPERATIONS.values() for name in operation.headers} == set(HEADERS)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_value_within_the_bounds_is_taken(name: str):
    """What the document allows is not refused."""
    for value in within(name):
        read(name, value)


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_value_outside_the_bounds_is_refused_by_name(name: str):
    """What the document does not allow is a 400 that names the parameter."""
    values = list(outside(name))
    assert values
    for value in values:
        with pytest.raises((BadRequest, UnsupportedParameter)) as refusal:
            read(name, value)
        assert refusal.value.status == 400
        assert str(refusal.value.param).startswith(name)


def test_every_code_stands_under_its_status():
    """Each error code is in the schema of the errors of its status, and in no other."""
    schemas = DOCUMENT["components"]["schemas"]
    for status in {code.status for code in CODES.values()} - {405}:
        codes = schemas[f"Error{status}"]["properties"]["error"]["properties"]["code"]["enum"]
        assert set(codes) == {name for name, code in CODES.items() if code.status == status}
        Draft202012Validator(schemas[f"Error{status}"]).validate(error_body(status, codes[0]))


def error_body(status: int, code: str) -> dict[str, object]:
    """The body of an error as the server makes it."""
    error = ServingError("It did not work.", code=code)
    assert error.as_body()["error"] is not None, status
    return error.as_body()


@pytest.mark.parametrize(("path", "operation"), [(p, o) for (m, p), o in OPERATIONS.items() if m == "GET"])
async def test_an_unknown_query_value_is_an_answer_that_is_described(serve: Serve, path: str, operation: Any):
    """A query value outside its bounds, and any path, is answered with a status that the document has."""
    served = await serve()
    described = DOCUMENT["paths"][path]["get"]["responses"]
    for name in operation.query or ("",):
        address = path.replace("{id}", "nothing") + (f"?{name}=-1" if name else "")
        answer = await served.call("GET", address)
        assert str(answer.status) in described, (address, answer.status)
        if QUERY.get(name, {}).keys() & {"enum", "minimum"} and "{id}" not in path:
            assert answer.status == 400
