"""Speculative decoding and grammars: SGLang 0.5.20 has both, and nothing bounds what they cost together.

A step then computes a mask for each draft token, through functions of its own (`traverse_tree`,
`eagle_sample`): a mask that stalls holds everyone, and a row without a way on ends the scheduler. So a model
that is served with speculation has no grammars, and says so (app.engine.sglang.grammar.NoGrammars).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.settings import SettingsError


def is_speculative(arguments: Mapping[str, Any]) -> bool:
    """Whether SGLang would speculate with these server arguments."""
    return bool(arguments.get("speculative_algorithm"))


def check_speculation(passed: Mapping[str, Any], where: str) -> None:
    """Raise SettingsError for a grammar backend beside speculation."""
    if is_speculative(passed) and passed.get("grammar_backend", "none") != "none":
        raise SettingsError(
            f"{where} grammar_backend: nothing bounds the cost of grammars with speculative decoding;"
            " leave this or speculative_algorithm out"
        )
