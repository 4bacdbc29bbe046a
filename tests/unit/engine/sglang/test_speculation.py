"""A model that is served with speculation has no grammars: it says so before the status line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.sglang.grammar import GrammarCheck, NoGrammars, grammar_check
from app.engine.sglang.speculation import check_speculation
from app.errors import UnsupportedParameter
from app.settings import SettingsError

WHERE = "[engine.sglang]"
EAGLE = {"speculative_algorithm": "EAGLE"}


def request(**parameters: Any) -> Any:
    """What is read of SGLang's chat request."""
    return SimpleNamespace(
        **{"regex": None, "ebnf": None, "response_format": None, "tools": None} | parameters
    )


def test_a_grammar_backend_beside_it_is_refused_by_name() -> None:
    """At start, with what to do."""
    for fine in ({}, EAGLE, EAGLE | {"grammar_backend": "none"}, {"grammar_backend": "xgrammar"}):
        check_speculation(fine, WHERE)
    with pytest.raises(SettingsError, match=r"grammar_backend: .* leave this or speculative_algorithm out"):
        check_speculation(EAGLE | {"grammar_backend": "xgrammar"}, WHERE)


@pytest.mark.parametrize(
    ("sampling", "sent", "param"),
    [
        ({"regex": "a"}, {"regex": "a"}, "regex"),
        ({"ebnf": "root ::= 'a'"}, {"ebnf": "root ::= 'a'"}, "ebnf"),
        ({"json_schema": "{}"}, {"response_format": SimpleNamespace(type="json_schema")}, "response_format"),
        (
            {"json_schema": "$$ANY$$"},
            {"response_format": SimpleNamespace(type="json_object")},
            "response_format",
        ),
        ({"structural_tag": "{}"}, {"tools": [{}]}, "tools"),
    ],
)
async def test_every_grammar_is_refused_by_its_parameter(
    sampling: dict[str, Any], sent: dict[str, Any], param: str
) -> None:
    """The message says why, and what works."""
    check = grammar_check(None, "none", speculative=True)
    assert check is not None
    with pytest.raises(UnsupportedParameter, match="speculative decoding") as refused:
        await check.check("owner", sampling, request(**sent))
    assert (refused.value.param, refused.value.status) == (param, 400)
    assert "`tool_choice` auto" in refused.value.message


async def test_a_request_without_a_grammar_passes() -> None:
    """Tools that the model may call need none."""
    check = grammar_check(None, "none", speculative=True)
    assert check is not None
    await check.check("owner", {"json_schema": None, "max_new_tokens": 3}, request(tools=[{}]))


def test_a_backend_whose_cost_is_not_known_is_left_unchecked() -> None:
    """The operator chose it; without any backend all grammars are refused."""
    assert grammar_check(None, "llguidance", speculative=False) is None
    assert isinstance(grammar_check(None, "xgrammar", speculative=False), NoGrammars)
    assert not isinstance(grammar_check(None, "none", speculative=False), GrammarCheck)
