"""No parameter holds up the step that all requests share, or ends an answer in a way that no client knows."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.support.sglang_owners import Node, schema

pytestmark = [pytest.mark.sglang, pytest.mark.timeout(400)]

NEVER = 'root ::= "abc" never\nnever ::= never "b"'
SWITCH = {
    "type": "object",
    "properties": {"on": {"type": "boolean"}},
    "required": ["on"],
    "additionalProperties": False,
}
DEAD_ENDS: dict[str, tuple[str, dict[str, Any]]] = {
    "a regex that is complete": ("a", {"regex": "a", "min_tokens": 12}),
    "null": ("null", schema({"const": None}) | {"min_tokens": 20}),
    "an object": (r'\{"on": ?(true|false)\}', schema(SWITCH) | {"min_tokens": 30}),
    "stop tokens inside": (
        "(a(b(c(d(e+f?)?)?)?)?)?",
        {"regex": "abcde+f", "min_tokens": 30, "stop_token_ids": [*range(70, 86)]},
    ),
    "no way on": ("abc", {"ebnf": NEVER}),
    "no way on, and no end": ("abc", {"ebnf": NEVER, "ignore_eos": True, "no_stop_trim": True}),
    "an end that is ignored": ("ab", {"regex": "ab", "ignore_eos": True, "no_stop_trim": True}),
    "an end that is a stop token": ("a", {"regex": "a", "min_tokens": 12, "stop_token_ids": [0, 2]}),
    "penalties": ("a", {"regex": "a", "min_tokens": 12, "repetition_penalty": 2, "frequency_penalty": 2}),
    "an end with a bias": ("a", {"regex": "a", "min_tokens": 12, "logit_bias": {"0": -100, "2": -100}}),
}


@pytest.mark.parametrize("name", DEAD_ENDS)
async def test_an_answer_without_a_way_on_ends_as_stop(node: Node, name: str):
    """Its text is what its grammar allows so far, and `finish_reason` is `stop`; `min_tokens` gives way."""
    expected, parameters = DEAD_ENDS[name]
    answer = await node.ask(node.hostile, n=3, temperature=1, **parameters)
    assert answer.status == 200, answer.body
    for choice in answer.json()["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(expected, choice["message"]["content"]), choice


async def test_logprobs_of_forbidden_tokens_are_numbers(node: Node):
    """The alternatives that a grammar forbids have OpenAI's least logprob, where JSON had null."""
    answer = await node.ask(node.hostile, regex="ab", min_tokens=9, logprobs=True, top_logprobs=20)
    entries = answer.json()["choices"][0]["logprobs"]["content"]
    values = [top["logprob"] for entry in entries for top in (entry, *entry["top_logprobs"])]
    assert min(values) == -9999.0


async def test_min_tokens_holds_where_a_grammar_can_go_on(node: Node):
    """The end is forbidden as long as something else is allowed."""
    answer = await node.ask(node.hostile, regex="(ab )+", min_tokens=20, max_tokens=30)
    assert answer.json()["usage"]["completion_tokens"] >= 20
