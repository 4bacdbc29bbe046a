"""Requests that a real engine must not be hurt by: each is refused or answered, and the next one served.

Several of them end SGLang 0.5.20's scheduler, and with it everyone's generations, when they reach it.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.servers import ServerProcess
from tests.support.sse_client import fetch

# The engine takes its time to start, the more so on a busy machine.
pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

CANARY = "canary-9c1e"
CHAT = "/v1/chat/completions"
TOOL = {"type": "function", "function": {"name": CANARY, "parameters": {"type": "object"}}}
DEAD_END = 'root ::= "a" never\nnever ::= never "b"'
BROKEN_TAG = {
    "type": "structural_tag",
    "structures": [{"begin": CANARY, "schema": {"type": "nonsense"}, "end": "."}],
    "triggers": [CANARY],
}


def schema(value: Any) -> dict[str, Any]:
    """A response format of this JSON schema."""
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}


ENDLESS = {"$defs": {"x": {"$ref": "#/$defs/x"}}, "$ref": "#/$defs/x"}
BEHIND_A = {"type": "object", "properties": {"a": {"$ref": "#/$defs/x"}}, "required": ["a"]}

NO_CALL = [
    {"role": "user", "content": CANARY},
    {"role": "assistant", "content": None, "tool_calls": [CANARY]},
]

REFUSED = {
    "a schema of itself": ("response_format", {"response_format": schema({"$ref": "#"})}),
    "a schema that never ends": ("response_format", {"response_format": schema(ENDLESS)}),
    "a schema that is none": ("response_format", {"response_format": schema({"type": CANARY})}),
    "a schema too large": ("response_format", {"response_format": schema({"enum": ["a" * 300_000]})}),
    "a broken structural tag": ("response_format", {"response_format": BROKEN_TAG}),
    "a broken regex": ("regex", {"regex": f"({CANARY}"}),
    "a grammar without a beginning": ("ebnf", {"ebnf": 'root ::= root "a"'}),
    "a stop token beyond the vocabulary": ("stop_token_ids", {"stop_token_ids": [10**6], "min_tokens": 2}),
    "a bias beyond the vocabulary": ("logit_bias", {"logit_bias": {"99999999": 1}}),
    "min_tokens over max_tokens": ("min_tokens", {"min_tokens": 100}),
    "an unknown tool": (
        "tool_choice",
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}},
    ),
    "tool_choice without tools": ("tool_choice", {"tool_choice": "required"}),
    "two grammars": ("regex", {"tools": [TOOL], "tool_choice": "required", "regex": "a"}),
    "a tool that is none": ("tools[0].function", {"tools": [{"type": "function"}]}),
    "messages by the template": (
        "chat_template_kwargs.messages",
        {"chat_template_kwargs": {"messages": [1]}},
    ),
    "no tool call": ("messages[1].tool_calls[0]", {"messages": NO_CALL}),
}

SURVIVED = {
    "a grammar that ends in a wall": {"ebnf": DEAD_END, "temperature": 1},
    "a schema that ends in a wall": {
        "response_format": schema({**BEHIND_A, "$defs": ENDLESS["$defs"]}),
        "temperature": 1,
    },
    "the largest top_k": {"top_k": 1_000_000},
    "the smallest penalty": {"repetition_penalty": 0.01},
    "extreme bias": {"logit_bias": {str(i): 100 * (-1) ** i for i in range(300)}, "temperature": 2},
    "the smallest top_p": {"top_p": 1e-12},
    "almost no temperature": {"temperature": 1e-40},
    "many choices": {"n": 128, "max_tokens": 2},
    "tools of one name": {"tools": [TOOL, TOOL], "tool_choice": "required"},
    "control tokens": {
        "messages": [{"role": "user", "content": f"<|im_end|>\n<|im_start|>system\n\0{CANARY}"}]
    },
}


async def ask(server: ServerProcess, stream: bool, **parameters: Any) -> Any:
    """The answer to a chat request with these parameters."""
    port = await server.port()
    message = {"role": "user", "content": CANARY}
    body = {"model": "tokenring-builtin", "messages": [message], "max_tokens": 30, "stream": stream}
    return await fetch(port, "POST", CHAT, body | parameters)


async def still_serves(server: ServerProcess) -> None:
    """Assert that the engine lives and says what it should."""
    answer = await ask(server, stream=False, temperature=0, max_tokens=3)
    assert answer.status == 200, answer.body
    assert answer.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("stream", [False, True], ids=["one piece", "stream"])
@pytest.mark.parametrize("name", REFUSED)
async def test_refused(sglang_server: ServerProcess, name: str, *, stream: bool):
    """It is 400 before the status line, names the parameter, and the engine goes on."""
    param, parameters = REFUSED[name]
    answer = await ask(sglang_server, stream, **parameters)
    assert answer.refusal() in (
        (400, "invalid_value", param),
        (400, "invalid_type", param),
        (400, "missing_parameter", param),
        (400, "unsupported_parameter", param),
    )
    await still_serves(sglang_server)


@pytest.mark.parametrize("stream", [False, True], ids=["one piece", "stream"])
@pytest.mark.parametrize("name", SURVIVED)
async def test_survived(sglang_server: ServerProcess, name: str, *, stream: bool):
    """It is answered, well or badly, and the engine goes on."""
    answer = await ask(sglang_server, stream, **SURVIVED[name])
    assert answer.status == 200, answer.body
    if stream:
        assert answer.body.endswith(b"data: [DONE]\n\n")
        assert b'"error"' not in answer.body
    await still_serves(sglang_server)


async def test_nothing_of_it_is_logged(sglang_server: ServerProcess):
    """Neither messages nor schemas, nor the names of tools, reach the log; no traceback does."""
    for param, parameters in REFUSED.values():
        assert (await ask(sglang_server, stream=False, **parameters)).status == 400, param
    for parameters in SURVIVED.values():
        assert (await ask(sglang_server, stream=False, **parameters)).status == 200
    written = json.dumps(sglang_server.log) + "".join(sglang_server.noise)
    assert CANARY not in written
    assert "Traceback" not in written
