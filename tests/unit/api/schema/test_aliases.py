"""Parameters under the names of other servers: what becomes of each, and whom an error names."""

from __future__ import annotations

from typing import Any

import pytest

from app.api.schema.aliases import translated
from app.api.schema.chat_request import parse_chat_request
from app.api.schema.parameters import PARAMETERS
from app.core import ChatRequest
from app.errors import BadRequest

HELLO = [{"role": "user", "content": "hello"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA}}
TAG = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a>"]}


def parse(**parameters: Any) -> ChatRequest:
    """A request with these parameters."""
    return parse_chat_request({"model": "m", "messages": HELLO} | parameters, "chatcmpl-1", "local")


def refusal(**parameters: Any) -> tuple[str, str | None]:
    """The code and param a request is refused with."""
    with pytest.raises(BadRequest) as error:
        parse(**parameters)
    return error.value.code, error.value.param


@pytest.mark.parametrize(
    ("sent", "equivalent"),
    [
        ({"guided_json": SCHEMA}, {"response_format": FORMAT}),
        ({"guided_json": '{"type": "object", "properties": {"city": {"type": "string"}}}'}, None),
        ({"json_schema": SCHEMA}, {"response_format": FORMAT}),
        ({"guided_regex": "[a-z]+"}, {"regex": "[a-z]+"}),
        ({"guided_grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"grammar": 'root ::= "a"'}, {"ebnf": 'root ::= "a"'}),
        ({"guided_choice": ["yes", 'no "x"\n']}, {"ebnf": 'root ::= "yes" | "no \\"x\\"\\n"'}),
        ({"structured_outputs": {"json": SCHEMA, "regex": None}}, {"response_format": FORMAT}),
        ({"structured_outputs": {"regex": "a"}}, {"regex": "a"}),
        ({"structured_outputs": {"choice": ["a"]}}, {"ebnf": 'root ::= "a"'}),
        ({"structured_outputs": {"grammar": "root ::= [a]"}}, {"ebnf": "root ::= [a]"}),
        ({"structured_outputs": {"json_object": True}}, {"response_format": {"type": "json_object"}}),
        ({"structured_outputs": {"json_object": False}}, {}),
        (
            {"structured_outputs": {"structural_tag": TAG, "disable_fallback": False}},
            {"response_format": {"type": "structural_tag", **TAG}},
        ),
        ({"include_stop_str_in_output": True}, {"no_stop_trim": True}),
        ({"repeat_penalty": 1.1}, {"repetition_penalty": 1.1}),
        ({"reasoning": {"effort": "low"}}, {"reasoning_effort": "low"}),
        ({"reasoning": {"effort": None}}, {}),
    ],
)
def test_a_name_of_another_server_reaches_the_engine_as_its_equivalent(
    sent: dict[str, Any], equivalent: dict[str, Any] | None
) -> None:
    """The engine gets the parameter that this server has, with the value in the form that it has here."""
    equivalent = {"response_format": FORMAT} if equivalent is None else equivalent
    body = parse(**sent).body
    assert {name: body[name] for name in body.keys() - {"model", "messages"}} == equivalent


def test_n_predict_is_max_tokens() -> None:
    """-1, which llama.cpp's clients send, is no limit."""
    assert parse(n_predict=7).max_tokens == 7
    assert parse(n_predict=-1).max_tokens is None
    assert parse(n_predict=-1, max_tokens=5).max_tokens == 5
    assert refusal(n_predict=0) == ("invalid_value", "n_predict")


def test_every_translated_parameter_is_translated() -> None:
    """A parameter that has an equivalent in the table is none of those that are parsed."""
    values = {
        "guided_json": {},
        "guided_regex": "a",
        "guided_choice": ["a"],
        "guided_grammar": "a",
        "structured_outputs": {"regex": "a"},
        "json_schema": {},
        "grammar": "a",
        "n_predict": 1,
        "repeat_penalty": 1,
        "reasoning": {},
        "include_stop_str_in_output": True,
    }
    assert {name for name, p in PARAMETERS.items() if p.equivalent is not None} == set(values)
    for name, value in values.items():
        names, _ = translated({name: value})
        assert name not in names
        for equivalent in names:
            assert equivalent in str(PARAMETERS[name].equivalent)


@pytest.mark.parametrize(
    ("sent", "code", "param"),
    [
        ({"guided_json": "{"}, "invalid_value", "guided_json"),
        ({"guided_json": "[1]"}, "invalid_type", "guided_json"),
        ({"guided_json": 5}, "invalid_type", "guided_json"),
        ({"guided_choice": []}, "invalid_value", "guided_choice"),
        ({"guided_choice": ["a", ""]}, "invalid_value", "guided_choice[1]"),
        ({"guided_choice": ["a", 5]}, "invalid_type", "guided_choice[1]"),
        ({"guided_choice": ["a"] * 1025}, "invalid_value", "guided_choice"),
        ({"structured_outputs": {}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"choice": ["a"] * 1025}}, "invalid_value", "structured_outputs.choice"),
        ({"structured_outputs": {"regex": "a", "grammar": "b"}}, "invalid_value", "structured_outputs"),
        ({"structured_outputs": {"regexp": "a"}}, "unknown_parameter", "structured_outputs.regexp"),
        (
            {"structured_outputs": {"structural_tag": "{"}},
            "invalid_value",
            "structured_outputs.structural_tag",
        ),
        (
            {"structured_outputs": {"regex": "a", "disable_any_whitespace": True}},
            "invalid_value",
            "structured_outputs.disable_any_whitespace",
        ),
        ({"repeat_penalty": 0}, "invalid_value", "repeat_penalty"),
        ({"reasoning": {"effort": "huge"}}, "invalid_value", "reasoning"),
        ({"reasoning": {"effort": []}}, "invalid_type", "reasoning"),
        ({"reasoning": {"max_tokens": 5}}, "unknown_parameter", "reasoning.max_tokens"),
        ({"guided_regex": "a", "regex": "b"}, "invalid_value", "guided_regex"),
        ({"grammar": "a", "guided_grammar": "b"}, "invalid_value", "guided_grammar"),
        ({"guided_regex": "a", "guided_json": {}}, "invalid_value", "guided_json"),
    ],
)
def test_an_error_names_the_parameter_that_was_sent(sent: dict[str, Any], code: str, param: str) -> None:
    """A caller who has never heard of the equivalent can find what is wrong."""
    assert refusal(**sent) == (code, param)


def test_two_forms_of_an_answer_are_named_as_they_were_sent() -> None:
    """The message of the refusal has the caller's own names."""
    with pytest.raises(BadRequest, match=r"guided_json: .* guided_regex gives it"):
        parse(guided_regex="a", guided_json={})


def test_an_error_of_the_engine_is_respelled() -> None:
    """What the engine says of the equivalent is said of the caller's parameter, once."""
    error = BadRequest("regex: no text matches this grammar.", param="regex")
    error.with_caller_param({"regex": "structured_outputs"})
    error.with_caller_param({"regex": "structured_outputs"})
    assert (error.message, error.param) == (
        "structured_outputs: no text matches this grammar.",
        "structured_outputs",
    )
    other = BadRequest("temperature: too hot.", param="temperature")
    other.with_caller_param({"regex": "guided_regex"})
    assert other.param == "temperature"
    unnamed = BadRequest("Something is wrong.")
    unnamed.with_caller_param({"regex": "guided_regex"})
    assert unnamed.param is None


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('{"a":' * 65 + "{}" + "}" * 65, "nesting_too_deep"),
        ('{"a":[' + "1," * 100_000 + "1]}", "too_many_values"),
        ('{"type":"object","type":"string"}', "invalid_value"),
        ('{"description":"' + "a" * 262_144 + '"}', "invalid_value"),
    ],
)
def test_json_within_a_string_is_bounded_as_a_body_is(text: str, code: str) -> None:
    """A text would otherwise get past the bounds of nesting, values and names."""
    assert refusal(guided_json=text) == (code, "guided_json")
    assert refusal(structured_outputs={"json": text}) == (code, "structured_outputs.json")
    assert refusal(structured_outputs={"structural_tag": text}) == (code, "structured_outputs.structural_tag")
