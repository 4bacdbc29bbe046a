"""`tools` and `tool_choice`: checked field by field, and brought to the form that all stages read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.schema.fields import bounded_text, fields_of, optional, required, shown
from app.api.schema.parameters import check_kind
from app.errors import BadRequest, UnsupportedParameter
from app.messages import MAX_NAME_CHARS

CHOICES = ("none", "auto", "required")
ACCEPTED_OF_TOOL = frozenset({"cache_control"})
"""Fields of a tool or of its function that are taken and dropped: Anthropic's, set whatever the server."""
_CHOICE = "tool_choice"


def normalized_tools(tools: Sequence[Any]) -> list[dict[str, Any]]:
    """The tools as the stages read them. Raises BadRequest and UnsupportedParameter naming the place."""
    return [_tool(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _tool(tool: Any, where: str) -> dict[str, Any]:
    check_kind(where, tool, dict)
    kind = tool.get("type")
    if kind not in ("function", None):
        raise UnsupportedParameter(
            f"{where}: tools of type {shown(kind)} are not served; describe a function.",
            param=f"{where}.type",
        )
    check_kind(f"{where}.function", tool.get("function"), dict)
    sent = fields_of(tool, where, {"type", "function", "defer_loading"} | ACCEPTED_OF_TOOL)
    function = _function(sent["function"], f"{where}.function")
    return {"type": "function", "function": function, **optional(sent, "defer_loading", where, bool)}


def _function(source: Any, where: str) -> dict[str, Any]:
    names = {"name", "description", "parameters", "strict", "defer_loading"} | ACCEPTED_OF_TOOL
    sent = fields_of(source, where, names)
    return {
        "name": bounded_text(required(sent, "name", where, str), f"{where}.name", MAX_NAME_CHARS),
        **optional(sent, "description", where, str),
        **optional(sent, "parameters", where, dict),
        **optional(sent, "strict", where, bool),
        **optional(sent, "defer_loading", where, bool),
    }


def chosen(choice: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """A tool choice as engines read it, and the tools among which the model may choose.

    Raises BadRequest and UnsupportedParameter naming the place.
    """
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise BadRequest(
                f"{_CHOICE} must be one of {', '.join(CHOICES)}, or name a function; got {shown(choice)}.",
                param=_CHOICE,
            )
        if choice == "required":
            _check_tools(tools)
        return choice, tools
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    if kind != "function":
        raise UnsupportedParameter(
            f"{_CHOICE}.type must be function or allowed_tools, got {shown(kind)}.", param=f"{_CHOICE}.type"
        )
    return {"type": "function", "function": {"name": _named(choice, _CHOICE, tools)}}, tools


def is_forced(choice: Any) -> bool:
    """True if an answer has to be a call."""
    return choice == "required" or isinstance(choice, Mapping)


def _allowed(
    choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """OpenAI's choice among some of the tools: the model sees those alone."""
    where = f"{_CHOICE}.allowed_tools"
    outer = fields_of(choice, _CHOICE, {"type", "allowed_tools"})
    sent = fields_of(required(outer, "allowed_tools", _CHOICE, dict), where, {"mode", "tools"})
    mode = sent.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise BadRequest(f"{where}.mode must be auto or required, got {shown(mode)}.", param=f"{where}.mode")
    entries = required(sent, "tools", where, list)
    names = {_named(entry, f"{where}.tools[{i}]", tools) for i, entry in enumerate(entries)}
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
    if mode == "required" and not allowed:
        raise BadRequest(f"{where}.tools must name a tool.", param=f"{where}.tools")
    return mode, allowed


def _named(source: Any, where: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The name of the function that a choice names. Raises BadRequest unless a tool has it."""
    sent = fields_of(source, where, {"type", "function"})
    function = fields_of(required(sent, "function", where, dict), f"{where}.function", {"name"})
    name = bounded_text(
        required(function, "name", f"{where}.function", str), f"{where}.function.name", MAX_NAME_CHARS
    )
    _check_tools(tools)
    if not any(tool["function"]["name"] == name for tool in tools):
        raise BadRequest(f"{where}: there is no function {shown(name)} in tools.", param=where)
    return name


def _check_tools(tools: Sequence[Mapping[str, Any]]) -> None:
    if not tools:
        raise BadRequest(f"{_CHOICE} requires a call, but there are no tools; send tools.", param=_CHOICE)
