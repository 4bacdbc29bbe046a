"""`tools` and `tool_choice`: checked field by field, and brought to the form that all stages read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from app.api.schema.fields import ARRAY, BOOL, OBJECT, TEXT, Field, check_kind, dropped, read, shown
from app.errors import BadRequest, UnsupportedParameter
from app.messages import MAX_NAME_CHARS

CHOICES = ("none", "auto", "required")
_NAME = Field((str,), max_chars=MAX_NAME_CHARS)
_CACHE_CONTROL = dropped(("cache_control",))
"""Anthropic's, set whatever the server."""
_FUNCTION: Mapping[str, Field] = {
    "name": _NAME,
    "description": TEXT,
    "parameters": OBJECT,
    "strict": BOOL,
    "defer_loading": BOOL,
    **_CACHE_CONTROL,
}
TOOL = Field(
    (dict,),
    fields={
        "type": Field((str,), choices=("function",)),
        "function": Field((dict,), fields=_FUNCTION, required=("name",)),
        "defer_loading": BOOL,
        **_CACHE_CONTROL,
    },
    required=("function",),
)
_NAMED = Field((dict,), fields={"name": _NAME}, required=("name",))
_CHOICE = Field((dict,), fields={"type": TEXT, "function": _NAMED}, required=("function",))
"""A choice of one function, and an entry of `allowed_tools`."""
_ALLOWED = Field(
    (dict,),
    fields={"mode": Field((str,), choices=("auto", "required")), "tools": ARRAY},
    required=("tools",),
)
_ALLOWED_CHOICE = Field(
    (dict,), fields={"type": TEXT, "allowed_tools": _ALLOWED}, required=("allowed_tools",)
)


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
    return {"type": "function", **read(tool, where, TOOL)}


def chosen(choice: Any, tools: Sequence[Mapping[str, Any]]) -> tuple[Any, Sequence[Mapping[str, Any]]]:
    """A tool choice as engines read it, and the tools among which the model may choose.

    Raises BadRequest and UnsupportedParameter naming the place.
    """
    if isinstance(choice, str):
        if choice not in CHOICES:
            raise BadRequest(
                f"tool_choice must be one of {', '.join(CHOICES)}, or name a function; got {shown(choice)}.",
                param="tool_choice",
            )
        if choice == "required":
            _check_any(tools)
        return choice, tools
    kind = choice.get("type", "function")
    if kind == "allowed_tools":
        return _allowed(choice, tools)
    if kind != "function":
        raise UnsupportedParameter(
            f"tool_choice.type must be function or allowed_tools, got {shown(kind)}.",
            param="tool_choice.type",
        )
    name = _named(read(choice, "tool_choice", _CHOICE), "tool_choice", tools)
    return {"type": "function", "function": {"name": name}}, tools


def is_forced(choice: Any) -> bool:
    """True if an answer has to be a call."""
    return choice == "required" or isinstance(choice, Mapping)


def _allowed(
    choice: Mapping[str, Any], tools: Sequence[Mapping[str, Any]]
) -> tuple[str, Sequence[Mapping[str, Any]]]:
    """OpenAI's choice among some of the tools: the model sees those alone."""
    sent = read(choice, "tool_choice", _ALLOWED_CHOICE)["allowed_tools"]
    where = "tool_choice.allowed_tools.tools"
    names = set()
    for i, entry in enumerate(sent["tools"]):
        names.add(_named(read(entry, f"{where}[{i}]", _CHOICE), f"{where}[{i}]", tools))
    allowed = [tool for tool in tools if tool["function"]["name"] in names]
    mode = sent.get("mode", "auto")
    if mode == "required" and not allowed:
        raise BadRequest(f"{where} must name a tool.", param=where)
    return mode, allowed


def _named(choice: Mapping[str, Any], where: str, tools: Sequence[Mapping[str, Any]]) -> str:
    """The name of the function that a choice names. Raises BadRequest unless a tool has it."""
    name: str = choice["function"]["name"]
    _check_any(tools)
    if not any(tool["function"]["name"] == name for tool in tools):
        raise BadRequest(f"{where}: there is no function {shown(name)} in tools.", param=where)
    return name


def _check_any(tools: Sequence[Mapping[str, Any]]) -> None:
    if not tools:
        raise BadRequest(
            "tool_choice requires a call, but there are no tools; send tools.", param="tool_choice"
        )
