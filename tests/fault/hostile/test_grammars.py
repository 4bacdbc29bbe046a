"""No grammar of one caller holds up another's stream: refused before the status line, or ended alone."""

from __future__ import annotations

import asyncio
import random
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers import ROOT, ServerProcess, start_process
from tests.support.sse_client import Response, Stream, fetch, open_stream, until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

CHAT = "/v1/chat/completions"
LEAST_SHARE = 0.2
"""Of the tokens per second that a stream has alone; generous, for the machine may be busy."""
MANY_RULES = "root ::= r0\n" + "\n".join(
    f'r{i} ::= r{(i * 7 + 1) % 1500} r{(i * 3 + 2) % 1500} | r{(i + 1) % 1500} | "a" | ""'
    for i in range(1500)
)
NESTED = "((a{0,999}){0,999}){0,999}"
AMBIGUOUS = 's ::= s s s | s s | "a"'


def schema(value: Any) -> dict[str, Any]:
    """A response format of this JSON schema."""
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


def tags(count: int, inner: Any) -> dict[str, Any]:
    """A response format of structural tags."""
    structures = [{"begin": f"<f{i}>", "schema": inner, "end": f"</f{i}>"} for i in range(count)]
    return {"response_format": {"type": "structural_tag", "structures": structures, "triggers": ["<f"]}}


def behind(letters: int) -> str:
    """Text that is all one way, longer than any walk."""
    chosen = random.Random(5)
    return "".join(chosen.choice("bcdefghijklmnopqrstuvwxyz") for _ in range(letters))


REFUSED: dict[str, tuple[str, dict[str, Any]]] = {
    "nested repetitions": ("regex", {"regex": NESTED}),
    "repetitions of what matches in two ways": ("regex", {"regex": "((a|b|ab|ba)*c?){1,400}"}),
    "an ambiguous grammar": ("ebnf", {"ebnf": f"root ::= s\n{AMBIGUOUS}", "max_tokens": 400}),
    "a pattern in a schema": ("response_format", schema({"type": "string", "pattern": f"^{NESTED}$"})),
    "a pattern of properties": (
        "response_format",
        schema({"type": "object", "patternProperties": {f"^{NESTED}$": {"type": "string"}}}),
    ),
    "a pattern in a tool": (
        "tools",
        {
            "tools": [
                {
                    "type": "function",
                    "function": {
                        "name": "f",
                        "strict": True,
                        "parameters": {
                            "type": "object",
                            "properties": {"a": {"type": "string", "pattern": NESTED}},
                            "required": ["a"],
                        },
                    },
                }
            ],
            "tool_choice": "required",
            "max_tokens": 400,
        },
    ),
    "a pattern in a tag": (
        "response_format",
        tags(3, {"type": "string", "pattern": f"^{NESTED}$"}) | {"max_tokens": 400},
    ),
    "rules that may be empty": (
        "ebnf",
        {"ebnf": 'root ::= a\na ::= b c d | ""\nb ::= a a | ""\nc ::= a b | "x" | ""\nd ::= c a | "y" | ""'},
    ),
    "unicode classes in nested repetitions": (
        "regex",
        {"regex": r"([\u4e00-\u9fff\u0400-\u04ff\w]{0,400}[\s\S]{0,400}){0,400}"},
    ),
    "an ambiguous expression": ("ebnf", {"ebnf": 'root ::= e\ne ::= e "+" e | e e | "(" e ")" | [0-9a-z ]'}),
    "more rules than can be compiled": ("ebnf", {"ebnf": MANY_RULES}),
    "references in a circle": (
        "response_format",
        schema({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    ),
    "a NUL in a pattern": ("response_format", schema({"type": "string", "pattern": "a\0b"})),
    "groups in groups": ("regex", {"regex": "(" * 3000 + "a" + ")*" * 3000}),
}

ADDRESS = {
    "type": "object",
    "properties": {
        "street": {"type": "string", "maxLength": 80},
        "geo": {"anyOf": [{"type": "null"}, {"type": "array", "items": {"type": "number"}, "maxItems": 2}]},
    },
    "required": ["street"],
}
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "born": {"type": "string", "format": "date"},
        "addresses": {"type": "array", "items": {"$ref": "#/$defs/Address"}},
        "kind": {"enum": ["customer", "supplier"]},
    },
    "required": ["name", "addresses"],
    "$defs": {"Address": ADDRESS},
}
ORDINARY: dict[str, dict[str, Any]] = {
    "an e-mail address": {"regex": r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}"},
    "an ISO time": {"regex": r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z"},
    "a nested schema": schema(PERSON),
    "500 values": schema({"enum": [f"value {i}" for i in range(500)]}),
    "a long string": schema({"type": "string", "maxLength": 1000}),
    "expressions": {"ebnf": 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'},
    "20 tools": {
        "tools": [
            {"type": "function", "function": {"name": f"f{i}", "parameters": PERSON}} for i in range(20)
        ],
        "tool_choice": "required",
    },
}


@dataclass
class Node:
    """A server with keys of two owners."""

    server: ServerProcess
    port: int
    hostile: dict[str, str]
    other: dict[str, str]
    _flows: list[Flow] = field(default_factory=list)

    async def ask(self, headers: dict[str, str], **parameters: Any) -> Response:
        """The answer to a chat request with these parameters."""
        return await fetch(self.port, "POST", CHAT, body(**parameters), headers)

    async def flow(self) -> Flow:
        """A long stream of the other key, read as it comes."""
        stream = await open_stream(
            self.port, body(ignore_eos=True, max_tokens=7000, stream=True), headers=self.other
        )
        flow = Flow(stream)
        self._flows.append(flow)
        return flow


class Flow:
    """A stream, and when its events came."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._came_s: list[float] = []
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        async for _ in self._stream.events():
            self._came_s.append(asyncio.get_running_loop().time())

    async def rate(self, seconds: float) -> float:
        """Events per second in the time that comes."""
        count = len(self._came_s)
        await asyncio.sleep(seconds)
        assert not self._reading.done()
        return (len(self._came_s) - count) / seconds

    async def close(self) -> None:
        """Leave."""
        self._reading.cancel()
        self._stream.connection.close()


def body(**parameters: Any) -> dict[str, Any]:
    """A chat request."""
    message = {"role": "user", "content": "hello"}
    return {"model": "tokenring-builtin", "messages": [message], "max_tokens": 40} | parameters


def made_key(directory: Path, name: str) -> dict[str, str]:
    """The header of a new key."""
    made = subprocess.run(
        [sys.executable, "-m", "app", "keys", "create", "--name", name],
        cwd=directory,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        check=True,
        text=True,
    )
    return {"authorization": f"Bearer {made.stdout.strip()}"}


@pytest.fixture(scope="module")
async def node(tmp_path_factory: pytest.TempPathFactory, anyio_backend: Any) -> AsyncIterator[Node]:
    """Real SGLang with the built-in model, for two owners."""
    directory = tmp_path_factory.mktemp("grammars")
    hostile, other = made_key(directory, "hostile"), made_key(directory, "other")
    server = await start_process(directory, "--safety", "off", "--resume-grace-s", "0")
    try:
        node = Node(server, await server.ready(timeout_s=200), hostile, other)
        assert (await node.ask(other)).status == 200
        yield node
        for flow in node._flows:
            await flow.close()
    finally:
        await server.close()


@pytest.mark.parametrize("name", REFUSED)
async def test_a_hostile_grammar_is_refused_and_another_stream_flows(node: Node, name: str):
    """It is 400 by the parameter's name, and meanwhile the other stream keeps its pace."""
    param, parameters = REFUSED[name]
    flow = await node.flow()
    await flow.rate(0.5)
    alone = await flow.rate(1.5)
    asked = asyncio.create_task(node.ask(node.hostile, **parameters))
    beside = await flow.rate(1.5)
    answer = await asked
    await flow.close()
    status, code, blamed = answer.refusal()
    assert (status, blamed) == (400, param), answer.body
    assert code in ("grammar_too_slow", "invalid_value")
    assert beside > LEAST_SHARE * alone


@pytest.mark.parametrize("parameters", ["regex", "ebnf"])
async def test_a_grammar_that_turns_slow_is_ended_alone(node: Node, parameters: str):
    """Beyond the walk the guard ends it with an error event, billed for what came; the other stream flows."""
    late = {
        "regex": {"regex": behind(900) + NESTED},
        "ebnf": {"ebnf": f'root ::= "{behind(900)}" s\n{AMBIGUOUS}'},
    }
    flow = await node.flow()
    await flow.rate(0.5)
    alone = await flow.rate(1.5)
    asked = asyncio.create_task(
        node.ask(node.hostile, **late[parameters], max_tokens=6000, min_tokens=3000, stream=True)
    )
    rates = []
    while not asked.done():
        rates.append(await flow.rate(0.5))
    answer = await asked
    await flow.close()
    assert answer.status == 200, answer.body
    *_, last, done = answer.body.decode().strip().split("\n\n")
    assert done.endswith("data: [DONE]")
    assert '"code":"grammar_too_slow"' in last
    assert f'"param":"{parameters}"' in last
    logged = [line for line in node.server.log if line.get("error") == "grammar_too_slow"][-1]
    assert logged["completion_tokens"] > 512
    assert sum(rates) / len(rates) > LEAST_SHARE * alone
    assert (await node.ask(node.other)).status == 200


async def test_a_slow_grammar_holds_up_no_other_request(node: Node):
    """While one compiles, plain requests and new ordinary grammars of others are answered."""
    slow = asyncio.create_task(node.ask(node.hostile, ebnf=MANY_RULES + "\n"))
    plain = await node.ask(node.other)
    formed = await node.ask(node.other, regex="[a-f]{3}x{2}")
    assert (plain.status, formed.status, slow.done()) == (200, 200, False)
    assert (await slow).status == 400


@pytest.mark.parametrize("name", ORDINARY)
async def test_an_ordinary_grammar_is_answered(node: Node, name: str):
    """It passes, and the second time nothing is checked."""
    for _ in range(2):
        answer = await node.ask(node.other, **ORDINARY[name])
        assert answer.status == 200, answer.body


async def test_a_flood_of_slow_grammars_leaves_room(node: Node):
    """Their owner waits, or is 503; another owner's new grammar is answered."""
    flood = [asyncio.create_task(node.ask(node.hostile, ebnf=MANY_RULES + "\n" * n)) for n in range(2, 14)]
    formed = await node.ask(node.other, regex="[a-f]{4}x{2}")
    assert formed.status == 200, formed.body
    answers = await asyncio.gather(*flood)
    assert {answer.status for answer in answers} <= {400, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status == 503)
    await until(lambda: all(task.done() for task in flood))


async def test_nothing_of_a_grammar_is_logged(node: Node):
    """Neither a refused grammar nor one that ends in a wall reaches the log."""
    canary = "canary-9c1e"
    assert (await node.ask(node.hostile, regex=f"{canary}{NESTED}")).status == 400
    dead_end = f'root ::= "a{canary}" never\nnever ::= never "b"'
    assert (await node.ask(node.hostile, ebnf=dead_end, temperature=1)).status == 200
    assert canary not in str(node.server.log) + "".join(node.server.noise)
