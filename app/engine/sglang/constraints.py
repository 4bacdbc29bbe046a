"""The form of an answer, mended where SGLang 0.5.20 builds a grammar that cannot be compiled or is too long.

- A named tool whose schema has `$defs`: SGLang puts the schema deeper into another, but not its definitions.
- Tools of which two define different things under a name of `$defs`: SGLang refuses them.
- References to anything else within a tool's schema (`#/definitions/X`, `#/properties/x`, `#`).
- Descriptions: no grammar needs them, and they are the bulk of what tool schemas say.
- A format beside tools that the model may call: SGLang's grammar has the format alone, so that no tool could
  be called. Where the model's calls have marks of their own, either is allowed here.
- `parallel_tool_calls: false`: SGLang's grammar of calls between marks allows several.
- `ignore_eos` beside a grammar: SGLang generates one more token behind the grammar's end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
from sglang.srt.function_call.function_call_parser import FunctionCallParser

from app.engine.sglang.grammar import KINDS
from app.errors import unknown_parameter

_PLACE_CHARS = 100
_ANNOTATIONS: Mapping[str, type | tuple[type, ...]] = {
    "title": str,
    "description": str,
    "$comment": str,
    "$schema": str,
    "examples": list,
    "default": (str, int, float, bool, list, type(None)),
    "deprecated": bool,
    "readOnly": bool,
    "writeOnly": bool,
}
"""Keywords of JSON schema that allow and forbid nothing, with the types of their values."""
_MAPS = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
"""Keywords whose value has names of the schema's author, each with a schema."""
_DATA = frozenset({"enum", "const", "required"})
"""Keywords whose value is no schema."""


def prepare_tools(request: ChatCompletionRequest) -> None:
    """Bring the tools of a request into a form for which SGLang builds a grammar that is right.

    Of a named choice only the named tool stays, and has to be called: the grammar of most formats
    (`get_legacy_structural_tag`) has all tools in it, so the model could call another than the one named.
    """
    choice = request.tool_choice
    if request.tools and not isinstance(choice, str):
        request.tools = [tool for tool in request.tools if tool.function.name == choice.function.name]
        request.tool_choice = "required"
    definitions: dict[str, Any] = {}
    for tool in request.tools or ():
        schema = tool.function.parameters
        if isinstance(schema, dict) and isinstance(schema.get("$defs"), dict):
            own = schema["$defs"]
            if any(name in definitions and definitions[name] != own[name] for name in own):
                tool.function.parameters = _with_old_definitions(schema)
            else:
                definitions |= own


def _with_old_definitions(schema: dict[str, Any]) -> dict[str, Any]:
    """A schema whose definitions have the keyword of older drafts, under which SGLang compares none."""
    if "definitions" in schema:
        return schema
    moved: dict[str, Any] = _rebuilt(schema, "#/$defs/", "#/definitions/", annotated=True)
    return {("definitions" if name == "$defs" else name): value for name, value in moved.items()}


def check_kept(sent: Any, read: Any, where: str) -> None:
    """Raise UnsupportedParameter, naming the place, for a field that SGLang's request does not have.

    `read` is what SGLang made of `sent`; its models drop what they do not know.
    """
    if isinstance(sent, dict) and isinstance(read, dict):
        for name, value in sent.items():
            place = f"{where}.{name[:_PLACE_CHARS]}"
            if name not in read and value is not None:
                raise unknown_parameter(place)
            check_kept(value, read.get(name), place)
    elif isinstance(sent, list) and isinstance(read, list):
        for number, (value, other) in enumerate(zip(sent, read, strict=False)):
            check_kept(value, other, f"{where}[{number}]")


def mend_grammar(sampling: dict[str, Any], request: ChatCompletionRequest, chat: OpenAIServingChat) -> None:
    """Make the grammar in SGLang's sampling parameters shorter, and complete where there are tools.

    `chat` is the conversion that made them.
    """
    source = sampling.get("json_schema")
    if source and source.startswith("{"):
        schema = orjson.loads(source)
        form = request.response_format
        of_tools = form is None or form.type == "text"
        tag = None if of_tools or request.tool_choice != "auto" else _format_or_call(schema, request, chat)
        if tag is not None:
            del sampling["json_schema"]
            sampling["structural_tag"] = _dumped(tag)
        else:
            sampling["json_schema"] = _dumped(_forced_call(schema) if of_tools else _rebuilt(schema, "", ""))
    if sampling.get("structural_tag"):
        tag = _shorter_tag(orjson.loads(sampling["structural_tag"]))
        if request.response_format is None and "structures" in tag and not request.parallel_tool_calls:
            tag = {"type": "structural_tag", "format": _current_format(tag, parallel=False)}
        sampling["structural_tag"] = _dumped(tag)
    if any(sampling.get(name) for name in KINDS):
        sampling["ignore_eos"] = False  # the end is the grammar's; SGLang would allow one more token, any


def _format_or_call(
    schema: dict[str, Any], request: ChatCompletionRequest, chat: OpenAIServingChat
) -> dict[str, Any] | None:
    """The structural tag of an answer that matches the schema or calls tools; None without marked calls."""
    if not request.tools or not chat.tool_call_parser:
        return None
    parser = FunctionCallParser(
        request.tools, chat.tool_call_parser, tokenizer=chat.tokenizer_manager.tokenizer
    )
    constraint = parser.get_structure_constraint(
        "required", parallel_tool_calls=request.parallel_tool_calls, thinking_mode=False
    )
    if constraint is None or constraint[0] != "structural_tag":
        return None
    calls = constraint[1].model_dump(by_alias=True)
    if "format" not in calls:
        calls = {"format": _current_format(calls, parallel=request.parallel_tool_calls)}
    either = [{"type": "json_schema", "json_schema": schema}, calls["format"]]
    return {"type": "structural_tag", "format": {"type": "or", "elements": either}}


def _current_format(legacy: dict[str, Any], *, parallel: bool) -> dict[str, Any]:
    """The format of a structural tag of the older kind."""
    tags = [
        {
            "type": "tag",
            "begin": item["begin"],
            "content": {"type": "json_schema", "json_schema": item["schema"] or {}},
            "end": item["end"],
        }
        for item in legacy["structures"]
    ]
    return {
        "type": "triggered_tags",
        "triggers": legacy["triggers"],
        "tags": tags,
        "at_least_one": legacy["at_least_one"],
        "stop_after_first": not parallel,
    }


def _forced_call(schema: dict[str, Any]) -> dict[str, Any]:
    """SGLang's schema of a list of calls, with the schema of each tool as a definition of its own."""
    definitions = {}
    for number, call in enumerate(schema["items"]["anyOf"]):
        name = f"parameters_{number}"
        definitions[name] = _rebuilt(call["properties"]["parameters"], "#", f"#/$defs/{name}")
        call["properties"]["parameters"] = {"$ref": f"#/$defs/{name}"}
    return schema | {"$defs": definitions}


def _rebuilt(node: Any, prefix: str, place: str, *, annotated: bool = False) -> Any:
    """A schema whose references into `prefix` lead to `place`; without annotations by default."""

    def rebuilt(inner: Any) -> Any:
        return _rebuilt(inner, prefix, place, annotated=annotated)

    if isinstance(node, list):
        return [rebuilt(item) for item in node]
    if not isinstance(node, dict):
        return node
    result: dict[str, Any] = {}
    for key, value in node.items():
        if key in _MAPS and isinstance(value, dict):
            result[key] = {name: rebuilt(schema) for name, schema in value.items()}
        elif key == "$ref" and isinstance(value, str) and value.startswith(prefix):
            result[key] = place + value.removeprefix(prefix)
        elif key in _DATA:
            result[key] = value
        elif annotated or not isinstance(value, _ANNOTATIONS.get(key, ())):
            result[key] = rebuilt(value)
    return result


def _shorter_tag(node: Any) -> Any:
    """A structural tag whose schemas have no annotations."""
    if isinstance(node, list):
        return [_shorter_tag(item) for item in node]
    if not isinstance(node, dict):
        return node
    return {
        key: _rebuilt(value, "", "") if key in ("schema", "json_schema") else _shorter_tag(value)
        for key, value in node.items()
    }


def _dumped(value: Any) -> str:
    return orjson.dumps(value).decode()
