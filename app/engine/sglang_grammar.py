"""Whether a grammar can be followed, before anything is sent to the model.

SGLang compiles it in the scheduler, after the status line, logs the source of one that fails (it
is the caller's text), and ends with one that allows no first token. Here the same compiler runs
over a vocabulary of single bytes, which takes milliseconds, and nothing is logged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson
import xgrammar

from app.errors import BadRequest

PARAM_OF: Mapping[str, str] = {
    "json_schema": "response_format",
    "regex": "regex",
    "ebnf": "ebnf",
    "structural_tag": "response_format",
}
MAX_SOURCE_CHARS = 64 * 1024
"""Compiling takes time by the square of a schema's optional properties: seconds, for 3,000."""

_END = 256
_CACHE_BYTES = 16 * 1024**2
_ANY_JSON = "$$ANY$$"


class GrammarCheck:
    """Compiles grammars to see whether they can be followed. Not thread-safe."""

    def __init__(self) -> None:
        vocabulary = [bytes([value]) for value in range(256)] + [b"<end>"]
        tokens = xgrammar.TokenizerInfo(vocabulary, xgrammar.VocabType.RAW, stop_token_ids=[_END])
        compiler = xgrammar.GrammarCompiler(tokens, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
        self._mask = xgrammar.allocate_token_bitmask(1, len(vocabulary))
        self._compile = {
            "json_schema": compiler.compile_json_schema,
            "regex": compiler.compile_regex,
            "ebnf": compiler.compile_grammar,
            "structural_tag": lambda source: compiler.compile_structural_tag(_structural_tag(source)),
        }

    def check(self, params: Any, tools: object) -> None:
        """Raise BadRequest, naming the parameter, unless the grammar in `params` can be followed.

        `params` are SGLang's sampling parameters; a grammar made from tools is blamed on them.
        """
        for name, compile_source in self._compile.items():
            source = getattr(params, name)
            if source is None or source == _ANY_JSON:
                continue
            param = "tools" if name == "structural_tag" and tools else PARAM_OF[name]
            if len(source) > MAX_SOURCE_CHARS:
                raise BadRequest(f"{param}: the grammar is over {MAX_SOURCE_CHARS} characters.", param=param)
            try:
                compiled = compile_source(source)
            except Exception as exc:  # noqa: BLE001  # xgrammar raises what it likes
                raise BadRequest(
                    f"{param}: not a grammar that can be followed: {_reason(exc)}", param=param
                ) from None
            if not self._can_begin(compiled):
                raise BadRequest(f"{param}: no text matches this grammar.", param=param)

    def _can_begin(self, compiled: Any) -> bool:
        matcher = xgrammar.GrammarMatcher(compiled)
        # False says that everything is allowed, and the mask is not written.
        return not matcher.fill_next_token_bitmask(self._mask) or bool(self._mask.any())


def _structural_tag(source: str) -> Any:
    """As SGLang reads one (constrained/xgrammar_backend.py): its legacy form, or xgrammar's own."""
    tag = orjson.loads(source)
    if "structures" not in tag:
        return source
    items = [
        xgrammar.StructuralTagItem(
            begin=s["begin"], schema=orjson.dumps(s["schema"] or {}).decode(), end=s["end"]
        )
        for s in tag["structures"]
    ]
    converted = xgrammar.StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
    converted.format.at_least_one = tag.get("at_least_one", False)
    return converted


def _reason(exc: Exception) -> str:
    """The first line of xgrammar's message, without its time and source position."""
    message = (str(exc).strip() or type(exc).__name__).splitlines()[0]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", message)[:200]
