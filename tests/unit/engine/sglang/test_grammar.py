"""A model that is served with speculation has no grammars: it says so before the status line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from app.engine.grammar.cost import GrammarBudget
from app.engine.sglang.grammar import GrammarCheck, grammar_check
from app.errors import UnsupportedParameter


def request(**parameters: Any) -> Any:
    """What is read of SGLang's chat request."""
    return SimpleNamespace(
        **{"regex": None, "ebnf": None, "response_format": None, "tools": None} | parameters
    )


def check_of(backend: str, *, speculative: bool = False) -> GrammarCheck:
    """The check of a model whose tokenizer xgrammar does not know."""

    def unknown() -> tuple[None, None]:
        return None, None

    manager = SimpleNamespace(tokenizer=SimpleNamespace(init_xgrammar=unknown), model_config=None)
    return grammar_check(
        manager, backend, any_whitespace=True, speculative=speculative, budget=GrammarBudget()
    )


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
    check = check_of("none", speculative=True)
    with pytest.raises(UnsupportedParameter, match="speculative decoding") as refused:
        await check.check("owner", sampling, request(**sent))
    assert (refused.value.param, refused.value.status) == (param, 400)
    assert "`tool_choice` auto" in refused.value.message


async def test_a_request_without_a_grammar_passes() -> None:
    """Tools that the model may call need none."""
    check = check_of("none", speculative=True)
    await check.check("owner", {"json_schema": None, "max_new_tokens": 3}, request(tools=[{}]))


REGEX: dict[str, Any] = {"regex": "a"}


async def test_a_backend_whose_cost_is_not_known_is_left_unchecked() -> None:
    """The operator chose it."""
    await check_of("llguidance").check("owner", REGEX, request(**REGEX))


@pytest.mark.parametrize("backend", ["none", "xgrammar"])
async def test_without_any_backend_all_grammars_are_refused(backend: str) -> None:
    """Also where SGLang's backend does not know the tokenizer; nothing is started for it."""
    check = check_of(backend)
    await check.start()
    with pytest.raises(UnsupportedParameter, match="served without grammars"):
        await check.check("owner", REGEX, request(**REGEX))
    await check.aclose()
