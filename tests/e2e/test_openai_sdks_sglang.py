"""OpenAI's own SDKs against real SGLang with the built-in model: what needs a real engine.

The model is small and knows no tools: what is asserted is what SGLang's grammar guarantees.
"""

from __future__ import annotations

import json
from typing import Any, Literal

import pytest
from openai import pydantic_function_tool
from pydantic import BaseModel

from tests.support.sdks import WEATHER, Case, Sdk, Seen, refused
from tests.support.servers import ServerProcess
from tests.support.sse_client import fetch

# The engine takes its time to start, the more so on a busy machine.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

OTHER = json.loads(json.dumps(WEATHER).replace("get_weather", "get_time"))
NAMED = {"type": "function", "function": {"name": "get_time"}}
SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "Weather",
        "strict": True,
        "schema": {
            "type": "object",
            "properties": {"sky": {"enum": ["clear", "cloudy"]}, "windy": {"type": "boolean"}},
            "required": ["sky", "windy"],
            "additionalProperties": False,
        },
    },
}


class Place(BaseModel):
    """A nested model: its schema is a definition that the others refer to."""

    city: Literal["Ulm", "Bonn"]


class Booking(BaseModel):
    """A model with two of those."""

    home: Place
    away: Place


BOOKING = pydantic_function_tool(Booking)


def is_weather(value: Any) -> bool:
    """Whether a JSON value is what the schema allows."""
    return (
        set(value) == {"sky", "windy"}
        and value["sky"] in ("clear", "cloudy")
        and value["windy"] in (True, False)
    )


def parsed(seen: Seen) -> bool:
    """The helper has made an object of the answer."""
    return len(seen["parsed"]) == 1 and is_weather(seen["parsed"][0])


def called(name: str) -> Any:
    """At least one call, each of this tool, with arguments that its schema allows."""

    def check(seen: Seen) -> bool:
        ((*calls,),) = seen["tools"]
        arguments = [json.loads(text) for _, text in calls]
        named = {tool for tool, _ in calls} == {name}
        return (
            named
            and all(a["city"] in ("Paris", "Rome") for a in arguments)
            and seen["finish"] == ["tool_calls"]
        )

    return check


def booked(seen: Seen) -> bool:
    """One call of the tool that the SDK made of a nested model, with arguments of that model."""
    [[name, arguments]] = seen["tools"][0]
    Booking.model_validate_json(arguments)
    return bool(name == "Booking")


def answered(seen: Seen) -> bool:
    """One choice with some text that came to an end."""
    (text,), (finish,) = seen["text"], seen["finish"]
    return len(text) > 0 and finish in ("stop", "length")


NONSENSE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "nonsense"}}}
TOOLS = {"tools": [WEATHER, OTHER], "parallel_tool_calls": False, "max_tokens": 200, "temperature": 0}
SHORT = {"max_tokens": 12, "temperature": 0}

CASES = [
    Case("one piece", "create", lambda s: answered(s) and s["usage"] > 1, SHORT),
    Case(
        "streaming with usage",
        "stream",
        lambda s: answered(s) and s["usage"] > 1,
        {**SHORT, "stream_options": {"include_usage": True}},
    ),
    Case(
        "the SDK's own accumulator",
        "stream_helper",
        lambda s: is_weather(json.loads(s["text"][0])),
        {"response_format": SCHEMA, "max_tokens": 100, "temperature": 0},
    ),
    Case("n=2", "create", lambda s: len(s["text"]) == 2 and all(s["text"]), {**SHORT, "n": 2}),
    Case("n=2 in the stream", "stream", lambda s: len(s["text"]) == 2 and all(s["text"]), {**SHORT, "n": 2}),
    Case("tool_choice auto", "create", answered, {**TOOLS, **SHORT, "tool_choice": "auto"}),
    Case("tool_choice none", "stream", answered, {**TOOLS, **SHORT, "tool_choice": "none"}),
    Case(
        "tool_choice required",
        "create",
        called("get_weather"),
        {**TOOLS, "tools": [WEATHER], "tool_choice": "required"},
    ),
    Case("tool_choice named", "create", called("get_time"), {**TOOLS, "tool_choice": NAMED}),
    Case(
        "a tool of a nested Pydantic model, named",
        "create",
        booked,
        {**TOOLS, "tools": [BOOKING], "tool_choice": {"type": "function", "function": {"name": "Booking"}}},
    ),
    Case(
        "a tool of a nested Pydantic model, required",
        "stream",
        booked,
        {**TOOLS, "tools": [BOOKING], "tool_choice": "required"},
    ),
    Case(
        "a call is required, and its answer has a format",
        "create",
        called("get_weather"),
        {**TOOLS, "tools": [WEATHER], "tool_choice": "required", "response_format": SCHEMA},
    ),
    Case("tool_choice named, in a stream", "stream", called("get_time"), {**TOOLS, "tool_choice": NAMED}),
    Case(
        "tool_choice named, accumulated", "stream_helper", called("get_time"), {**TOOLS, "tool_choice": NAMED}
    ),
    Case("the parsing helper", "parse", parsed, {"max_tokens": 100, "temperature": 0}),
    Case(
        "a JSON schema in a stream",
        "stream",
        lambda s: is_weather(json.loads(s["text"][0])),
        {"response_format": SCHEMA, "max_tokens": 100, "temperature": 0},
    ),
    refused(
        "a schema that is none", "BadRequestError", 400, "invalid_value", params={"response_format": NONSENSE}
    ),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
async def test_sdk(sdk: Sdk, sglang_server: ServerProcess, case: Case):
    """The SDK makes of a real engine's answers what its users expect."""
    port = await sglang_server.port()
    model = (await fetch(port, "GET", "/v1/models")).json()["data"][0]["id"]
    seen = await sdk.run(port, case, model)
    assert "crash" not in seen, (sdk.version, seen)
    assert case.check(seen), (sdk.version, seen)


async def test_stop(sdk: Sdk, sglang_server: ServerProcess):
    """A stop string ends the answer before it, in one piece and in a stream."""
    port = await sglang_server.port()
    model = (await fetch(port, "GET", "/v1/models")).json()["data"][0]["id"]
    whole = await sdk.run(port, Case("whole", "create", answered, SHORT), model)
    (text,) = whole["text"]
    stop = text[len(text) // 2 :][:3]
    for op in ("create", "stream"):
        seen = await sdk.run(port, Case("stop", op, answered, {**SHORT, "stop": stop}), model)
        assert seen["text"] == [text.partition(stop)[0]], (sdk.version, op, stop, seen)
        assert seen["finish"] == ["stop"]
