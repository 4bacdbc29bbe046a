"""Grammars that cost more than a stream may wait for, and are refused."""

from __future__ import annotations

from typing import Any

from tests.support.sglang_owners import schema

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
