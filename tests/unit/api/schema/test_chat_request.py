"""The request on the wire: what is taken, what is refused, and by which name."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.api.schema.chat_request import parse_chat_request
from app.api.schema.messages import ROLES
from app.api.schema.parameters import PARAMETERS
from app.core import ChatRequest
from app.errors import BadRequest, UnknownModel, UnsupportedParameter
from app.intake.json_body import MAX_DEPTH, MAX_VALUES, count_values, parse_body

HELLO = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "f"}}]
HARMLESS = {
    "user": "u",
    "safety_identifier": "u",
    "prompt_cache_key": "k",
    "prompt_cache_retention": "24h",
    "service_tier": "flex",
    "verbosity": "medium",
    "prediction": {"type": "content", "content": "x"},
    "num_ctx": 8192,
    "keep_alive": "5m",
    "cache_prompt": False,
    "id_slot": -1,
    "timings_per_token": True,
    "return_progress": True,
    "guided_decoding_backend": "xgrammar",
}
"""A value of each parameter without effect."""


def parse(**parameters: Any) -> ChatRequest:
    """A request with these parameters."""
    return parse_chat_request({"model": "m", "messages": HELLO} | parameters, "chatcmpl-1", "local")


def refusal(**parameters: Any) -> tuple[str, str | None]:
    """The code and param a request is refused with."""
    with pytest.raises(BadRequest) as error:
        parse(**parameters)
    return error.value.code, error.value.param


def body_refusal(raw: bytes) -> str:
    """The code a body is refused with."""
    with pytest.raises(BadRequest) as error:
        parse_body(raw)
    return error.value.code


def number_of(value: Any) -> int:
    """The values in a JSON value, itself with them, empty arrays and objects twice."""
    if isinstance(value, list | dict):
        children = list(value.values()) if isinstance(value, dict) else value
        return 1 + (sum(map(number_of, children)) if children else 1)
    return 1


@pytest.mark.parametrize(
    ("raw", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b"null", "invalid_json"),
        (b'{"a": NaN}', "invalid_json"),
        (b'{"a": "\\ud800"}', "invalid_json"),
        (b'{"a": "\xff"}', "invalid_encoding"),
        (b"\xef\xbb\xbf{}", "invalid_json"),
        (b'{"a":' * (MAX_DEPTH + 1) + b"1" + b"}" * (MAX_DEPTH + 1), "nesting_too_deep"),
        (b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"}", "nesting_too_deep"),
        (b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}", "too_many_values"),
    ],
)
def test_bodies_that_are_no_request(raw: bytes, code: str):
    """Broken JSON, broken UTF-8, no object, and nesting bombs each have their code."""
    assert body_refusal(raw) == code


@pytest.mark.parametrize(
    ("raw", "param"),
    [
        (b'{"model": "a", "model": "b"}', "model"),
        (b'{"model": "a", "mod\\u0065l": "b"}', "model"),
        (b'{"messages": [{"role": "user", "content": "\\":{", "content": "b"}]}', "content"),
        (b'{"a": {"b": [[{"c": {}, "c": [1]}]]}}', "c"),
        (b'{"": 1, "": 1}', ""),
        (b'{"x": "' + b"y" * (1 << 20) + b'", "x": 1}', None),
    ],
)
def test_a_name_twice_in_an_object_is_refused(raw: bytes, param: str | None):
    """Parsers disagree on which of the two counts."""
    with pytest.raises(BadRequest) as error:
        parse_body(raw)
    assert (error.value.code, error.value.param) == ("invalid_json", param)


@given(
    st.dictionaries(
        st.text(max_size=5),
        st.recursive(
            st.none()
            | st.integers()
            | st.text(max_size=6)
            | st.sampled_from(['"', ":", "\\", '{"a":1,"a":1}', "\n"]),
            lambda inner: (
                st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
            ),
            max_leaves=8,
        ),
    )
)
def test_names_that_differ_pass(body: dict[str, Any]):
    """Whatever stands in names and strings: quotes, colons, backslashes, JSON."""
    for raw in (json.dumps(body), json.dumps(body, ensure_ascii=False, indent=1)):
        with contextlib.suppress(UnicodeEncodeError):
            parse_body(raw.encode())


def test_nesting_up_to_the_limit_passes():
    """The limit is on levels, not on the number of brackets."""
    deep = b'{"a":' + b"[" * (MAX_DEPTH - 1) + b"]" * (MAX_DEPTH - 1) + b"}"
    assert "a" in parse_body(deep)
    wide = b'{"a":[' + b",".join([b"[]"] * 10_000) + b"]}"
    assert len(parse_body(wide)["a"]) == 10_000


def test_values_up_to_the_limit_pass():
    """What looks like structure inside of strings is text, and escapes end nowhere."""
    for text in ('{"[,":1}', '\\"', "\\" * 7 + '"', "\\\\", "", "[{,}]" * 9):
        strings = [text] * (MAX_VALUES - 2)
        assert parse_body(json.dumps({"a": strings}).encode())["a"] == strings
        with pytest.raises(BadRequest) as error:
            parse_body(json.dumps({"a": [*strings, "x"], "b": text}).encode())
        assert error.value.code == "too_many_values"


JSON = st.recursive(
    st.none() | st.integers() | st.text(alphabet='\\"[]{},:a中', max_size=20),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(alphabet='\\"[],a', max_size=9), inner),
)


@given(JSON)
def test_values_are_counted_exactly(value: Any):
    """The count on the raw bytes is that of the parsed value, wherever the bytes are cut."""
    for raw in (json.dumps(value).encode(), json.dumps(value, ensure_ascii=False).encode()):
        for chunk_bytes in (1, 2, 3, 7, 1000):
            assert count_values(raw, chunk_bytes=chunk_bytes) == number_of(value)


def test_null_is_absent():
    """A parameter that is null counts as not given, as in OpenAI's API."""
    chat = parse(temperature=None, stop=None, stream=None, n=None, max_tokens=None, tools=None)
    assert (chat.n, chat.max_tokens) == (1, None)
    assert set(chat.body) == {"model", "messages"}


def test_server_parameters_do_not_reach_the_engine():
    """What only the server reads is kept from the engine."""
    chat = parse(
        stream=True, stream_options={"include_usage": True}, user="u", metadata={"project": "x"}, top_k=5
    )
    assert set(chat.body) == {"model", "messages", "top_k"}
    assert chat.include_usage
    assert chat.metadata == {"project": "x"}


@pytest.mark.parametrize(
    ("parameters", "code", "param"),
    [
        ({"model": None}, "missing_parameter", "model"),
        ({"messages": None}, "missing_parameter", "messages"),
        ({"messages": []}, "invalid_value", "messages"),
        ({"messages": "hi"}, "invalid_type", "messages"),
        ({"messages": ["hi"]}, "invalid_type", "messages[0]"),
        ({"messages": [{"role": "king", "content": "x"}]}, "invalid_role", "messages[0].role"),
        ({"messages": [{"content": "x"}]}, "invalid_role", "messages[0].role"),
        ({"messages": [{"role": [], "content": "x"}]}, "invalid_role", "messages[0].role"),
        ({"messages": [*HELLO, {"role": "user"}]}, "missing_parameter", "messages[1].content"),
        ({"messages": [{"role": "user", "content": 7}]}, "invalid_type", "messages[0].content"),
        ({"messages": [{"role": "user", "content": [7]}]}, "invalid_type", "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{}]}]}, "invalid_type", "messages[0].content[0].type"),
        ({"messages": HELLO * 2049}, "invalid_value", "messages"),
        (
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 1366}] * 3},
            "invalid_value",
            "messages",
        ),
        ({"tools": [{}] * 129}, "invalid_value", "tools"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "invalid_value", "logit_bias"),
        ({"metadata": {str(i): "v" for i in range(17)}}, "invalid_value", "metadata"),
        ({"metadata": {"n" * 65: "v"}}, "invalid_value", "metadata"),
        ({"metadata": {"n": "v" * 513}}, "invalid_value", "metadata.n"),
        ({"metadata": {"n": {}}}, "invalid_type", "metadata.n"),
        ({"user": "u" * 513}, "invalid_value", "user"),
        ({"model": "m" * 513}, "invalid_value", "model"),
        ({"conversation_id": "c" * 129}, "invalid_value", "conversation_id"),
        ({"max_tokens": 0}, "invalid_value", "max_tokens"),
        ({"max_tokens": -1}, "invalid_value", "max_tokens"),
        ({"max_tokens": 1.5}, "invalid_type", "max_tokens"),
        ({"max_tokens": "5"}, "invalid_type", "max_tokens"),
        ({"max_tokens": True}, "invalid_type", "max_tokens"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "invalid_value", "max_completion_tokens"),
        ({"n": 0}, "invalid_value", "n"),
        ({"n": 129}, "invalid_value", "n"),
        ({"temperature": 2.1}, "invalid_value", "temperature"),
        ({"temperature": "hot"}, "invalid_type", "temperature"),
        ({"stream": 1}, "invalid_type", "stream"),
        ({"stream_options": {}}, "invalid_value", "stream_options"),
        (
            {"stream": True, "stream_options": {"usage": True}},
            "unsupported_parameter",
            "stream_options.usage",
        ),
        (
            {"stream": True, "stream_options": {"include_usage": 1}},
            "invalid_type",
            "stream_options.include_usage",
        ),
        ({"stop": ["a"] * 17}, "invalid_value", "stop"),
        ({"stop": ["a", 1]}, "invalid_type", "stop[1]"),
        ({"stop": ["a" * 1000] * 16, "n": 5}, "invalid_value", "stop"),
        ({"stop": "a" * 513, "n": 128}, "invalid_value", "stop"),
        ({"logit_bias": {str(i): 1 for i in range(1024)}, "n": 17}, "invalid_value", "logit_bias"),
        ({"top_logprobs": 3}, "invalid_value", "top_logprobs"),
        ({"colour": "red"}, "unknown_parameter", "colour"),
        ({"store": "yes"}, "invalid_type", "store"),
        ({"parent_id": "msg_1"}, "invalid_value", "parent_id"),
        ({"conversation_id": "conv_1", "store": False}, "invalid_value", "store"),
        ({"priority": 9}, "unsupported_parameter", "priority"),
        ({"add_generation_prompt": False}, "invalid_value", "add_generation_prompt"),
        (
            {"add_generation_prompt": True, "continue_final_message": True},
            "invalid_value",
            "add_generation_prompt",
        ),
        ({"regex": "a", "ebnf": "b"}, "invalid_value", "ebnf"),
        ({"regex": "a", "response_format": {"type": "json_object"}}, "invalid_value", "response_format"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "invalid_value", "regex"),
        (
            {
                "tools": TOOLS,
                "tool_choice": "required",
                "response_format": {"type": "structural_tag", "format": {}},
            },
            "invalid_value",
            "response_format",
        ),
        ({"tools": [{"function": {"name": "f"}, "foo": 1}]}, "unknown_parameter", "tools[0].foo"),
        ({"response_format": {"type": "text", "foo": 1}}, "unknown_parameter", "response_format.foo"),
        ({"function_call": {"name": "f"}}, "unsupported_parameter", "function_call"),
    ],
)
def test_bad_parameters_are_refused_by_name(parameters: dict[str, Any], code: str, param: str):
    """Each wrong parameter has its code and is named."""
    assert refusal(**parameters) == (code, param)


@pytest.mark.parametrize("role", ROLES)
def test_every_role_is_taken(role: str):
    """OpenAI's five roles pass."""
    assert parse(messages=[{"role": role, "content": "x"}]).body["messages"][0]["role"] == role


def test_equal_limits_are_one():
    """max_tokens and max_completion_tokens may both be sent when they agree."""
    assert parse(max_tokens=5, max_completion_tokens=5).max_tokens == 5
    assert parse(max_completion_tokens=6).max_tokens == 6


@pytest.mark.parametrize(("name", "value"), HARMLESS.items())
def test_what_is_harmless_is_taken_unless_the_operator_is_strict(name: str, value: Any):
    """A parameter without effect never breaks a client; a strict server names it."""
    assert set(parse(**{name: value}).body) == {"model", "messages"}
    with pytest.raises(UnsupportedParameter, match="strict_parameters") as error:
        parse_chat_request({"model": "m", "messages": HELLO, name: value}, "c", "local", strict=True)
    assert error.value.param == name


def test_every_parameter_without_effect_is_tried():
    """The table and the test above know the same parameters."""
    assert {name for name in PARAMETERS if PARAMETERS[name].treatment == "ignored"} == set(HARMLESS)


def test_a_strict_server_takes_what_has_an_effect_or_asks_for_nothing():
    """Honoured parameters, translated ones, and neutral values of refused ones."""
    sent = {"seed": 5, "temperature": 1, "guided_regex": "a", "best_of": 1, "n_predict": 3}
    body = {"model": "m", "messages": HELLO, **sent}
    chat = parse_chat_request(body, "chatcmpl-1", "local", strict=True)
    assert chat.strict
    assert set(chat.body) == {"model", "messages", "seed", "temperature", "regex", "max_tokens"}
    assert not parse().strict


@pytest.mark.parametrize(
    ("sent", "body"),
    [
        ({"top_p": 0}, {"top_k": 1}),
        ({"top_p": 0.0, "top_k": 40}, {"top_k": 1}),
        ({"top_k": 0}, {"top_k": -1}),
        ({"reasoning_effort": "no_think"}, {"reasoning_effort": "none"}),
        ({"reasoning_effort": 1}, {"reasoning_effort": 0.99}),
        ({"response_format": {"type": "text"}}, {}),
        ({"top_logprobs": 0}, {"top_logprobs": 0}),
        ({"add_generation_prompt": True}, {}),
        (
            {"add_generation_prompt": False, "continue_final_message": True},
            {"continue_final_message": True},
        ),
    ],
)
def test_a_value_that_sglang_refuses_is_sent_as_it_takes_it(sent: dict[str, Any], body: dict[str, Any]):
    """Bounds that mean something: no mass is the likeliest token, no number of tokens is all of them."""
    parsed = parse(**sent).body
    assert {name: parsed[name] for name in parsed.keys() - {"model", "messages"}} == body


@pytest.mark.parametrize("form", [{"type": "json_object"}, {"type": "json_schema", "schema": {}}])
def test_a_forced_call_has_no_response_format(form: dict[str, Any]):
    """There is no text that the format could apply to; beside tools left to the model it stays."""
    forced = parse(tools=TOOLS, tool_choice="required", response_format=form).body
    assert forced["tool_choice"] == "required"
    assert "response_format" not in forced
    assert "response_format" in parse(tools=TOOLS, response_format=form).body


def test_a_null_stream_option_is_absent():
    """As SDKs write out what was not set."""
    options = {"include_usage": True, "include_obfuscation": None, "continuous_usage_stats": None}
    chat = parse(stream=True, stream_options=options)
    assert (chat.include_usage, chat.continuous_usage) == (True, False)


def test_usage_is_an_event_only_when_asked():
    """A stream has a usage chunk only when asked; an answer in one piece has usage anyway."""
    assert not parse().include_usage
    assert not parse(stream=True).include_usage


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@given(parameters=st.dictionaries(st.sampled_from(sorted(PARAMETERS)) | st.text(max_size=8), json_values))
def test_anything_is_parsed_or_refused(parameters: dict[str, Any]):
    """No JSON object makes parsing fail in any other way than a refusal that says why."""
    raw = json.dumps({"model": "m", "messages": HELLO} | parameters).encode()
    with contextlib.suppress(BadRequest):
        chat = parse_chat_request(parse_body(raw), "chatcmpl-1", "local")
        assert 1 <= chat.n <= 128


def test_moderation_asks_for_the_object():
    """The parameter is the server's own: the engine does not see it."""
    chat = parse(moderation={"model": "omni-moderation-latest"})
    assert chat.moderated
    assert "moderation" not in chat.body
    assert not parse().moderated
    assert not parse(moderation=None).moderated


@pytest.mark.parametrize(
    ("asked", "code", "param"),
    [
        (True, "invalid_type", "moderation"),
        ({}, "missing_parameter", "moderation.model"),
        ({"model": None}, "missing_parameter", "moderation.model"),
        ({"model": 5}, "invalid_type", "moderation.model"),
        ({"model": "omni-moderation-latest", "mode": "x"}, "unknown_parameter", "moderation.mode"),
    ],
)
def test_a_moderation_that_cannot_be_honoured(asked: Any, code: str, param: str):
    """It has a model and nothing else."""
    assert refusal(moderation=asked) == (code, param)


def test_an_unknown_moderation_model():
    """A model of OpenAI's that is none of its moderation models is not found."""
    with pytest.raises(UnknownModel) as error:
        parse(moderation={"model": "gpt-4"})
    assert error.value.param == "moderation.model"
