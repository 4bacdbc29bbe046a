"""`tools` and `tool_choice`: the form that engines get, and the place that a refusal names."""

from __future__ import annotations

from typing import Any

import openai
import pytest
from pydantic import BaseModel

from app.api.schema.tools import chosen, is_forced, normalized_tools
from app.errors import BadRequest

F = {"type": "function", "function": {"name": "f"}}
G = {"type": "function", "function": {"name": "g"}}


class Street(BaseModel):
    """A nested model."""

    name: str
    number: int


class Address(BaseModel):
    """A model with another in it, whose schema has `$defs`."""

    street: Street


def refusal(tools: list[Any]) -> tuple[str, str | None]:
    """The code and param tools are refused with."""
    with pytest.raises(BadRequest) as error:
        normalized_tools(tools)
    return error.value.code, error.value.param


def choice_refusal(choice: Any, *tools: dict[str, Any]) -> tuple[str, str | None]:
    """The code and param a choice is refused with."""
    with pytest.raises(BadRequest) as error:
        chosen(choice, tools)
    return error.value.code, error.value.param


def allowed(*names: str, mode: str | None = "auto") -> dict[str, Any]:
    """OpenAI's choice among these tools."""
    entries = [{"type": "function", "function": {"name": name}} for name in names]
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": entries}}


def test_a_tool_of_the_sdk_stays_as_it_is() -> None:
    """A tool that OpenAI's SDK makes of a Pydantic model keeps its definitions and its strictness."""
    tool = openai.pydantic_function_tool(Address)
    assert "$defs" in tool["function"]["parameters"]
    assert normalized_tools([tool]) == [tool]


def test_nulls_and_marks_of_other_servers_are_dropped() -> None:
    """As SDKs write out what was not set, and as Anthropic's clients mark what to cache."""
    mark = {"cache_control": {"type": "ephemeral"}}
    function = {"name": "f", "description": None, "parameters": None, "strict": None, **mark}
    assert normalized_tools([{"type": None, "function": function, **mark}]) == [F]


@pytest.mark.parametrize(
    ("tool", "code", "param"),
    [
        (5, "invalid_type", ""),
        ({"type": "web_search"}, "unsupported_parameter", ".type"),
        ({"type": "custom", "custom": {"name": "x"}}, "unsupported_parameter", ".type"),
        ({"type": "function"}, "missing_parameter", ".function"),
        ({"type": "function", "name": "f", "parameters": {}}, "unknown_parameter", ".name"),
        (F | {"foo": 1}, "unknown_parameter", ".foo"),
        ({"function": "f"}, "invalid_type", ".function"),
        ({"function": {}}, "missing_parameter", ".function.name"),
        ({"function": {"name": 5}}, "invalid_type", ".function.name"),
        ({"function": {"name": "n" * 257}}, "invalid_value", ".function.name"),
        ({"function": {"name": "f", "foo": 1}}, "unknown_parameter", ".function.foo"),
        ({"function": {"name": "f", "parameters": []}}, "invalid_type", ".function.parameters"),
        ({"function": {"name": "f", "strict": "yes"}}, "invalid_type", ".function.strict"),
        ({"function": {"name": "f", "description": 5}}, "invalid_type", ".function.description"),
    ],
)
def test_a_tool_is_refused_by_its_place(tool: Any, code: str, param: str) -> None:
    """No field of a tool is dropped in silence, whichever tool has it."""
    assert refusal([F, tool]) == (code, f"tools[1]{param}")


def test_a_choice_is_brought_to_the_form_of_openai() -> None:
    """Words stay words; a named function needs a tool of that name."""
    for word in ("none", "auto", "required"):
        assert chosen(word, [F]) == (word, [F])
    assert chosen("none", []) == ("none", [])
    assert chosen({"function": {"name": "f"}}, [F, G]) == (F, [F, G])


def test_allowed_tools_are_the_tools_that_the_model_sees() -> None:
    """The others are left out, in the order of the tools."""
    assert chosen(allowed("g", "f"), [F, G]) == ("auto", [F, G])
    assert chosen(allowed("g"), [F, G]) == ("auto", [G])
    assert chosen(allowed("g", mode="required"), [F, G]) == ("required", [G])
    assert chosen(allowed("g", mode=None), [F, G]) == ("auto", [G])
    assert chosen(allowed(), [F]) == ("auto", [])


def test_a_call_is_forced_by_a_word_or_a_name() -> None:
    """Neither auto nor none forces a call."""
    assert [is_forced(choice) for choice in ("required", F, "auto", "none", None)] == [
        True,
        True,
        False,
        False,
        False,
    ]


@pytest.mark.parametrize(
    ("choice", "code", "param"),
    [
        ("any", "invalid_value", "tool_choice"),
        ({"type": "custom"}, "unsupported_parameter", "tool_choice.type"),
        ({"type": "function", "name": "f"}, "unknown_parameter", "tool_choice.name"),
        ({"type": "function"}, "missing_parameter", "tool_choice.function"),
        (F | {"foo": 1}, "unknown_parameter", "tool_choice.foo"),
        ({"function": {"name": "f", "foo": 1}}, "unknown_parameter", "tool_choice.function.foo"),
        ({"function": {}}, "missing_parameter", "tool_choice.function.name"),
        ({"function": {"name": "other"}}, "invalid_value", "tool_choice"),
        (allowed("other"), "invalid_value", "tool_choice.allowed_tools.tools[0]"),
        (allowed("f", mode="none"), "invalid_value", "tool_choice.allowed_tools.mode"),
        (allowed(mode="required"), "invalid_value", "tool_choice.allowed_tools.tools"),
    ],
)
def test_a_choice_is_refused_by_its_place(choice: Any, code: str, param: str) -> None:
    """What cannot be chosen, and what no engine would read."""
    assert choice_refusal(choice, F) == (code, param)


@pytest.mark.parametrize("choice", ["required", F])
def test_a_call_needs_tools(choice: Any) -> None:
    """The refusal names the choice, which is what can be taken back."""
    assert choice_refusal(choice) == ("invalid_value", "tool_choice")
