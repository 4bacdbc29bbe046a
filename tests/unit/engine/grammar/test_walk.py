"""The walk ahead, with the real xgrammar: what is slow is refused with what it cost, the rest passes."""

from __future__ import annotations

import itertools
import json
import string
import subprocess
import sys
from typing import Any

import pytest
import xgrammar

from app.engine.grammar.walk import Vocabulary, Walker

END = b"<end>"
NESTED = "((a{0,999}){0,999}){0,999}"
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 80},
        "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 100},
        "home": {"$ref": "#/$defs/Place"},
    },
    "required": ["name", "home"],
    "$defs": {"Place": {"type": "object", "properties": {"city": {"enum": ["Rome", "Oslo"]}}}},
}


@pytest.fixture(scope="module")
def walker() -> Walker:
    """Over single bytes, pairs of letters, and runs of one letter."""
    pairs = ["".join(pair).encode() for pair in itertools.product(string.ascii_letters, repeat=2)]
    runs = [letter.encode() * count for letter in "ab ." for count in range(3, 9)]
    tokens = [*(bytes([value]) for value in range(256)), *pairs, *runs, END]
    info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[len(tokens) - 1])
    return Walker(Vocabulary(info.serialize_json()), mask_ms=2.0)


def tag(begin: str, inner: Any, **more: Any) -> dict[str, Any]:
    """A tag of SGLang's older form."""
    return {"begin": begin, "schema": inner, "end": "</f>"} | more


def tags(*structures: dict[str, Any]) -> str:
    """A structural tag, as its source."""
    return json.dumps({"type": "structural_tag", "structures": structures, "triggers": ["<f"]})


FORMED = {"type": "tag", "begin": "<f>", "content": {"type": "regex", "pattern": NESTED}, "end": "</f>"}

SLOW = {
    "nested repetitions": ("regex", NESTED),
    "what matches in two ways": ("regex", "((a|b|ab|ba)*c?){1,400}"),
    "an ambiguous grammar": ("ebnf", 'root ::= s\ns ::= s s s | s s | "a"'),
    "an ambiguous expression": ("ebnf", 'root ::= e\ne ::= e "+" e | e "-" e | e e | "(" e ")" | [0-9a-z ]'),
    "rules that may be empty": ("ebnf", 'root ::= a\na ::= b a c | ""\nb ::= a a | ""\nc ::= a b | "x" | ""'),
    "behind letters": ("regex", f"[a-z]{{100}}{NESTED}"),
    "a pattern": ("json_schema", json.dumps({"type": "string", "pattern": f"^{NESTED}$"})),
    "a pattern in an array": (
        "json_schema",
        json.dumps({"type": "array", "items": {"type": "string", "pattern": NESTED}, "minItems": 1}),
    ),
    "a pattern in the second tag": (
        "structural_tag",
        tags(tag("<f1>", PERSON), tag("<f2>", {"type": "string", "pattern": NESTED})),
    ),
    "a regex in a new tag": (
        "structural_tag",
        json.dumps({"type": "structural_tag", "format": {"type": "sequence", "elements": [FORMED]}}),
    ),
}
PASSED = {
    "an e-mail address": ("regex", r"[a-zA-Z0-9._%+-]+@[a-zA-Z0-9.-]+\.[a-zA-Z]{2,}"),
    "an ISO time": ("regex", r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}Z"),
    "anything": ("regex", ".*"),
    "an unambiguous list": ("ebnf", 'root ::= "a" root | "a"'),
    "an expression": ("ebnf", 'root ::= term ("+" term)*\nterm ::= [0-9]+ | "(" root ")"'),
    "a nested schema": ("json_schema", json.dumps(PERSON)),
    "500 values": ("json_schema", json.dumps({"enum": [f"value {i}" for i in range(500)]})),
    "a million items": ("json_schema", json.dumps({"type": "array", "items": {}, "maxItems": 10**6})),
    "20 tags": ("structural_tag", tags(*(tag(f"<f{i}>", PERSON) for i in range(20)))),
}
INVALID = {
    "an open group": ("regex", "(("),
    "no schema": ("json_schema", '{"type": "nonsense"}'),
    "a NUL": ("json_schema", json.dumps({"type": "string", "pattern": "a\0"})),
    "a plain NUL": ("regex", "a\0"),
    "too many groups": ("regex", "(" * 3000 + "a" + ")*" * 3000),
}


@pytest.mark.parametrize("name", SLOW)
def test_a_slow_grammar_is_found(walker: Walker, name: str):
    """The walk ends soon after the bound, and says what it cost and what it may."""
    report = walker.check(*SLOW[name], tokens=10_000)
    assert report.outcome == "slow", report
    assert "2 ms a token" in report.reason


@pytest.mark.parametrize("name", PASSED)
def test_an_ordinary_grammar_passes(walker: Walker, name: str):
    """It costs next to nothing, wherever the walk goes."""
    report = walker.check(*PASSED[name], tokens=10_000)
    assert report.outcome == "passed", report
    assert report.tokens > 20


@pytest.mark.parametrize("name", INVALID)
def test_what_is_no_grammar_is_invalid(walker: Walker, name: str):
    """The reason is xgrammar's, without its source position."""
    report = walker.check(*INVALID[name], tokens=100)
    assert report.outcome == "invalid"
    assert report.reason
    assert ".cc" not in report.reason


@pytest.mark.parametrize(
    "source", ['{"$ref": "#"}', '{"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}']
)
def test_a_schema_that_no_text_matches_is_empty(walker: Walker, source: str):
    """There is no first token."""
    assert walker.check("json_schema", source, tokens=100).outcome == "empty"


def test_a_short_answer_may_have_what_is_slow_only_later(walker: Walker):
    """The walk goes no further than the answer may."""
    ambiguous = 'root ::= s\ns ::= s s s | s s | "a"'
    assert walker.check("ebnf", ambiguous, tokens=3).outcome == "passed"
    assert walker.check("ebnf", ambiguous, tokens=500).outcome == "slow"


def test_a_worker_needs_neither_torch_nor_transformers():
    """It imports xgrammar alone, in 100 MiB at most; if this fails, look at what xgrammar imports now."""
    code = (
        "import sys\n"
        "from app.engine.grammar.worker import import_xgrammar_alone\n"
        "import_xgrammar_alone()\n"
        "import app.engine.grammar.walk\n"
        "assert not hasattr(sys.modules['torch'], '__file__')\n"
        "assert not hasattr(sys.modules['transformers'], '__file__')\n"
        "print(open('/proc/self/status').read().split('VmRSS:')[1].split()[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 100 * 1024
