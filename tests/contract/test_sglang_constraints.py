"""The grammar of an answer for models whose calls have marks: by SGLang's code, without an engine."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.engine.grammar.walk import Vocabulary, Walker
from app.engine.http.model import Facts
from app.errors import BadRequest, UnsupportedParameter
from tests.support.engines import chat

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(300), pytest.mark.filterwarnings("default")]

BUILTIN = Path(__file__).parents[2] / "app" / "engine" / "builtin"
CITY = {"type": "object", "properties": {"city": {"enum": ["Ulm", "Bonn"]}}, "required": ["city"]}
STRICT = {"additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "n", "schema": CITY | STRICT}}
TRIP = {
    "$defs": {"City": {"enum": ["Ulm", "Bonn"]}},
    "type": "object",
    "properties": {"to": {"$ref": "#/$defs/City"}},
    "required": ["to"],
    "additionalProperties": False,
}
MARKED = ("qwen25", "deepseekv3")
"""Parsers of calls between marks, each with its own."""

Accepts = Callable[[str], bool]


def tool(name: str, parameters: dict[str, Any]) -> dict[str, Any]:
    """A strict tool with this schema."""
    return {"type": "function", "function": {"name": name, "parameters": parameters, "strict": True}}


@pytest.fixture(scope="module", params=MARKED)
def model(request: pytest.FixtureRequest) -> Any:
    """The built-in model's tokenizer with another model's tool parser; no engine, no weights."""
    from app.engine.sglang.remote import RemoteModelOptions, load_remote_model

    facts = {"model_path": str(BUILTIN), "served_model_name": "m", "tool_call_parser": request.param}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return load_remote_model(
            Facts(facts, {"max_total_num_tokens": 8192, "grammar_backend": "xgrammar"}), RemoteModelOptions()
        )


def call_of(model: Any, name: str, arguments: str) -> str:
    """A call as the model writes it."""
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    detector = FunctionCallParser([], model._chat.tool_call_parser).detector
    info = detector.structure_info()(name)
    return f"{info.begin}{arguments}{info.end}"


def grammar(model: Any, **parameters: Any) -> tuple[Accepts, dict[str, Any]]:
    """Whether an answer to such a request may be a text, and SGLang's sampling parameters."""
    import xgrammar

    sampling = model.render(chat(**parameters)).handle.sent["sampling_params"]
    kind = next(kind for kind in ("json_schema", "structural_tag") if sampling.get(kind))
    setup = model._grammar._pool._setup
    walker = Walker(Vocabulary(setup.serialized, setup.any_whitespace, None), mask_ms=50)
    assert walker.check(kind, sampling[kind], 64).outcome == "passed"
    compiled = walker._compile(kind, sampling[kind])

    def accepts(text: str) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled, terminate_without_stop_token=True)
        return bool(matcher.accept_string(text))

    return accepts, sampling


def test_beside_a_format_the_model_may_still_call(model: Any) -> None:
    """An answer is the format or a call: an agent that asks for both can use its tools."""
    accepts, _ = grammar(model, tools=[tool("go", TRIP)], response_format=FORM)
    assert accepts('{"city": "Ulm"}')
    assert accepts(call_of(model, "go", '{"to": "Bonn"}'))
    assert not accepts("Hello")
    assert not accepts('{"city": "Rome"}')
    assert not accepts(call_of(model, "go", '{"to": "Rome"}'))
    assert not accepts(call_of(model, "fly", "{}"))


def test_a_tool_choice_of_none_leaves_the_format_alone(model: Any) -> None:
    """Where no tool may be called only the format is allowed."""
    accepts, sampling = grammar(model, tools=[tool("go", TRIP)], tool_choice="none", response_format=FORM)
    assert "structural_tag" not in sampling
    assert accepts('{"city": "Ulm"}')
    assert not accepts(call_of(model, "go", '{"to": "Bonn"}'))


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "go"}}])
def test_a_forced_call_obeys_its_definitions(model: Any, choice: Any) -> None:
    """Between marks too, also where two tools define different things under a name."""
    other = json.loads(json.dumps(TRIP).replace("Ulm", "Oslo"))
    accepts, _ = grammar(model, tools=[tool("go", TRIP), tool("fly", other)], tool_choice=choice)
    assert accepts(call_of(model, "go", '{"to": "Ulm"}'))
    assert not accepts(call_of(model, "go", '{"to": "Oslo"}'))
    assert accepts(call_of(model, "fly", '{"to": "Oslo"}')) == (choice == "required")


@pytest.mark.parametrize("form", [None, FORM], ids=["a forced call", "beside a format"])
def test_only_parallel_calls_may_be_several(model: Any, form: Any) -> None:
    """`parallel_tool_calls: false` ends the answer with the first call."""
    form_or_choice = {"tool_choice": "required"} if form is None else {"response_format": form}
    call = call_of(model, "go", '{"to": "Ulm"}')
    for parallel in (True, False):
        parameters = {"tools": [tool("go", TRIP)], "parallel_tool_calls": parallel, **form_or_choice}
        accepts, _ = grammar(model, **parameters)
        assert accepts(call)
        assert accepts(call + call) == parallel


def test_descriptions_are_no_part_of_a_grammar(model: Any) -> None:
    """128 tools of 20 described properties, a million characters, are fewer than a grammar may have."""
    from app.engine.sglang.grammar import MAX_JSON_CHARS

    properties = {f"property_{n}": {"type": "string", "description": "d" * 200} for n in range(20)}
    tools = [tool(f"tool_{n}", {"type": "object", "properties": properties}) for n in range(128)]
    sampling: dict[str, Any] = {}
    body = {"messages": [{"role": "user", "content": "x"}], "tools": tools, "tool_choice": "required"}
    mended(model, body, sampling)
    assert "ddd" not in sampling["structural_tag"]
    assert len(sampling["structural_tag"]) < MAX_JSON_CHARS


def mended(model: Any, body: dict[str, Any], sampling: dict[str, Any]) -> None:
    """Put SGLang's grammar for the request into `sampling`; the prompt may be of any length."""
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.function_call.function_call_parser import FunctionCallParser

    from app.engine.sglang.constraints import mend_grammar, prepare_tools

    request = ChatCompletionRequest.model_validate(body | {"model": "m"})
    prepare_tools(request)
    parser = FunctionCallParser(request.tools, model._chat.tool_call_parser)
    constraint = parser.get_structure_constraint("required")
    sampling |= request.to_sampling_params([], {}, constraint)
    mend_grammar(sampling, request, model._chat)


def test_a_field_that_sglang_drops_from_a_structural_tag_is_refused(model: Any) -> None:
    """Its place is named, however deep it is."""
    tag = {
        "type": "structural_tag",
        "format": {"type": "sequence", "elements": [{"type": "any_text", "foo": 1}]},
    }
    with pytest.raises(BadRequest) as refused:
        model.render(chat(response_format=tag))
    assert (refused.value.code, refused.value.param) == (
        "unknown_parameter",
        "response_format.format.elements[0].foo",
    )


async def test_a_model_with_speculation_says_that_it_has_no_grammars() -> None:
    """In its capabilities, and in a 400 before the status line; tools that it may call are served."""
    from app.engine.sglang.remote import RemoteModelOptions, load_remote_model

    facts = {"model_path": str(BUILTIN), "served_model_name": "m", "tool_call_parser": "qwen25"}
    server = {"max_total_num_tokens": 8192, "grammar_backend": "none", "speculative_algorithm": "EAGLE"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = load_remote_model(Facts(facts, server), RemoteModelOptions())
    assert "json_schema" not in model.card.capabilities
    free = tool("trip", CITY)
    free["function"]["strict"] = False
    await model.check_grammar("owner", model.render(chat(tools=[free])))
    for param, parameters in (
        ("response_format", {"response_format": FORM}),
        ("response_format", {"response_format": {"type": "json_object"}}),
        ("regex", {"regex": "a"}),
        ("tools", {"tools": [free], "tool_choice": "required"}),
    ):
        with pytest.raises(UnsupportedParameter, match="speculative decoding") as refused:
            await model.check_grammar("owner", model.render(chat(**parameters)))
        assert refused.value.param == param
