"""No grammar of one caller holds up another's stream: refused before the status line, or ended alone."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.hostile_grammars import MANY_RULES, NESTED, REFUSED
from tests.support.sglang_owners import Node, schema
from tests.support.sse_client import until

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

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
async def test_a_hostile_grammar_is_refused(node: Node, name: str):
    """It is 400 by the parameter's name."""
    param, parameters = REFUSED[name]
    answer = await node.ask(node.hostile, **parameters)
    status, code, blamed = answer.refusal()
    assert (status, blamed) == (400, param), answer.body
    assert code in ("grammar_too_slow", "invalid_value")


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
