"""No grammar of one caller holds up another's stream: refused before the status line, or ended alone."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.support.sglang_owners import LEAST_SHARE, Node, schema
from tests.support.sse_client import until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

MANY_RULES = "root ::= r0\n" + "\n".join(
    f'r{i} ::= r{(i * 7 + 1) % 1500} r{(i * 3 + 2) % 1500} | r{(i + 1) % 1500} | "a" | ""'
    for i in range(1500)
)
NESTED = "((a{0,999}){0,999}){0,999}"
AMBIGUOUS = 's ::= s s s | s s | "a"'


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
    """Their owner waits, or is 429 or 503; another owner's new grammar is answered."""
    flood = [asyncio.create_task(node.ask(node.hostile, ebnf=MANY_RULES + "\n" * n)) for n in range(2, 14)]
    formed = await node.ask(node.other, regex="[a-f]{4}x{2}")
    assert formed.status == 200, formed.body
    answers = await asyncio.gather(*flood)
    assert {answer.status for answer in answers} <= {400, 429, 503}
    assert all("retry-after" in answer.headers for answer in answers if answer.status == 503)
    await until(lambda: all(task.done() for task in flood))


async def test_nothing_of_a_grammar_is_logged(node: Node):
    """Neither a refused grammar nor one that ends in a wall reaches the log."""
    canary = "canary-9c1e"
    assert (await node.ask(node.hostile, regex=f"{canary}{NESTED}")).status == 400
    dead_end = f'root ::= "a{canary}" never\nnever ::= never "b"'
    assert (await node.ask(node.hostile, ebnf=dead_end, temperature=1)).status == 200
    assert canary not in str(node.server.log) + "".join(node.server.noise)
