"""A grammar compiled and walked ahead over a model's vocabulary, to measure what its token masks cost.

Runs in a process of its own (app.engine.grammar.worker): xgrammar's C++ cannot be interrupted, may take
all memory, and may crash. Imports xgrammar, and nothing of the product but the measure.
"""

from __future__ import annotations

import json
import random
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
import xgrammar

from app.engine.grammar.cost import CostMeter

MAX_WALK_TOKENS = 512
"""Ambiguous grammars cost the cube of the answer's length: 100 ms are spent by the 60th token."""
STEADY_TOKENS = 128
"""Tokens at a small and steady cost after which a walk ends."""
STRATEGY_S = 0.25
STEADY_SHARE = 0.1
"""The share of the allowance per token below which a steady walk ends early."""
CANDIDATES = 3
MAX_TAGS = 64
_CACHE_BYTES = 64 * 1024**2
_WORD_BITS = 32
_WORD = re.compile(rb"[A-Za-z0-9\x80-\xff]+")
_FEW_WORDS = 64

Outcome = Literal["passed", "invalid", "empty", "slow"]


class Report(NamedTuple):
    """The result for a grammar; `reason` tells a caller why it did not pass."""

    outcome: Outcome
    reason: str = ""
    tokens: int = 0


class Vocabulary(NamedTuple):
    """A model's tokens as xgrammar serializes them, and how its backend uses them."""

    serialized: str
    any_whitespace: bool = True
    stop_token_ids: Sequence[int] | None = None


class Walker:
    """Checks grammars over one vocabulary. `mask_ms` is what a token's mask may cost on average."""

    def __init__(self, vocabulary: Vocabulary, *, mask_ms: float) -> None:
        info = xgrammar.TokenizerInfo.deserialize_json(vocabulary.serialized)
        self._compiler = xgrammar.GrammarCompiler(info, max_threads=1, cache_limit_bytes=_CACHE_BYTES)
        self._any_whitespace = vocabulary.any_whitespace
        self._stops = vocabulary.stop_token_ids
        self._mask_ms = mask_ms
        words = -(-info.vocab_size // _WORD_BITS)
        self._mask = np.zeros((1, words), dtype=np.int32)
        self._is_text = _bits(info, self._stops, words)
        self._lengths = np.zeros(words * _WORD_BITS, dtype=np.int32)
        self._lengths[: info.vocab_size] = [len(token) for token in info.decoded_vocab]
        self._is_word = _packed([bool(_WORD.fullmatch(token)) for token in info.decoded_vocab], words)

    def check(self, kind: str, source: str, tokens: int) -> Report:
        """Compile and walk one grammar, as far as an answer of that many tokens goes."""
        try:
            if _has_nul(kind, source):  # xgrammar 0.2.1 would crash
                return Report("invalid", "NUL characters are not allowed")
            compiled = self._compile(kind, source)
        except Exception as exc:  # noqa: BLE001  # xgrammar raises what it likes
            return Report("invalid", _reason(exc))
        walked = 0
        for number, (matcher, choose) in enumerate(self._walks(compiled, kind, source)):
            if number == 0 and self._is_empty(matcher):
                return Report("empty")
            meter = CostMeter(self._mask_ms)
            self._walk(matcher, choose, min(tokens, MAX_WALK_TOKENS), meter)
            walked += meter.tokens
            if meter.exceeded:
                return Report("slow", meter.in_words(), tokens=walked)
        return Report("passed", tokens=walked)

    def _compile(self, kind: str, source: str) -> Any:
        if kind == "json_schema":
            return self._compiler.compile_json_schema(source, any_whitespace=self._any_whitespace)
        if kind == "regex":
            return self._compiler.compile_regex(source)
        if kind == "ebnf":
            return self._compiler.compile_grammar(source)
        return self._compiler.compile_structural_tag(_structural_tag(source))

    def _walks(self, compiled: Any, kind: str, source: str) -> Iterator[tuple[Any, _Choose]]:
        """The ways to walk a grammar, each with a matcher of its own at the place where it begins."""
        for choose in self._strategies():
            yield xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._stops), choose
        if kind == "structural_tag":  # behind the beginning of each tag: no other walk writes one by chance
            for begin in list(_begins(json.loads(source)).values())[:MAX_TAGS]:
                matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=self._stops)
                if matcher.accept_string(begin):
                    yield matcher, self._again

    def _is_empty(self, matcher: Any) -> bool:
        """True if a grammar allows no token at its beginning, as far as `STRATEGY_S` shows."""
        began_s = time.thread_time()
        filled = matcher.fill_next_token_bitmask(self._mask)
        # Not filled says that everything is allowed, and the mask is not written.
        return filled and time.thread_time() - began_s < STRATEGY_S and not self._mask.any()

    def _walk(self, matcher: Any, choose: _Choose, tokens: int, meter: CostMeter) -> None:
        """Follow one strategy until the answer's end, the cost's bound, or nothing new is to be seen."""
        costs_ms: list[float] = []
        last: int | None = None
        deadline_s = time.thread_time() + STRATEGY_S + tokens * self._mask_ms / 1e3
        while len(costs_ms) < tokens and time.thread_time() < deadline_s:
            began_s = time.thread_time()
            if not matcher.fill_next_token_bitmask(self._mask):
                self._mask.fill(-1)
            filled_s = time.thread_time()
            last = choose(matcher, self._mask[0] & self._is_text, last)
            chosen_s = time.thread_time()
            if last is not None and not matcher.accept_token(last):
                last = None
            cost_ms = 1e3 * (filled_s - began_s + time.thread_time() - chosen_s)
            costs_ms.append(cost_ms)
            meter.spend(cost_ms)
            if last is None or meter.exceeded or self._is_steady(costs_ms):
                return

    def _is_steady(self, costs_ms: list[float]) -> bool:
        if len(costs_ms) < STEADY_TOKENS or len(costs_ms) % _WORD_BITS:
            return False
        half = len(costs_ms) // 2
        earlier_ms, later_ms = sum(costs_ms[:half]), sum(costs_ms[half:])
        return later_ms < STEADY_SHARE * self._mask_ms * half and later_ms < 1.5 * earlier_ms + STEADY_SHARE

    def _strategies(self) -> tuple[_Choose, ...]:
        """Ways through a grammar, none of which ends the answer while it can continue."""
        return (
            lambda _matcher, allowed, _last: _first(allowed),
            self._longest,
            self._again,
            _random(1),
            self._wordy(_random(2)),
            self._costliest(self._wordy(_random(3))),
        )

    def _longest(self, _matcher: Any, allowed: Any, _last: int | None) -> int | None:
        """The token of most bytes: the fastest way through a long beginning that is all one way."""
        allowed = self._words_of(allowed)
        words = np.flatnonzero(allowed)
        if not len(words):
            return None
        ids = _ids(allowed, words[:: max(1, len(words) // _FEW_WORDS)])
        return int(ids[np.argmax(self._lengths[ids])])

    def _again(self, _matcher: Any, allowed: Any, last: int | None) -> int | None:
        """The last token as long as it is allowed: repetition is where states pile up."""
        allowed = self._words_of(allowed)
        if last is not None and allowed[last // _WORD_BITS] >> (last % _WORD_BITS) & 1:
            return last
        return _first(allowed)

    def _words_of(self, allowed: Any) -> Any:
        """The allowed tokens that are letters and digits, where there are any: others end strings."""
        words = allowed & self._is_word
        return words if words.any() else allowed

    def _wordy(self, choose: _Choose) -> _Choose:
        return lambda matcher, allowed, last: choose(matcher, self._words_of(allowed), last)

    def _costliest(self, pick: _Choose) -> _Choose:
        """Choose, of a few tokens, the token after which the next mask costs most."""

        def choose(matcher: Any, allowed: Any, last: int | None) -> int | None:
            candidates = {pick(matcher, allowed, last) for _ in range(CANDIDATES)} | {
                self._again(matcher, allowed, last)
            }
            if len(candidates) == 1:
                return candidates.pop()
            costs: dict[int, float] = {}
            for token in candidates - {None}:
                assert token is not None
                began_s = time.thread_time()
                if matcher.accept_token(token):
                    matcher.fill_next_token_bitmask(self._mask)
                    costs[token] = time.thread_time() - began_s
                    matcher.rollback(1)
            return max(costs, key=lambda token: costs[token]) if costs else None

        return choose


_Choose = Callable[[Any, Any, "int | None"], "int | None"]


def _random(seed: int) -> _Choose:
    """Any token that is allowed, the same ones in each run."""
    rng = random.Random(seed)  # noqa: S311  # a walk, no secret

    def choose(_matcher: Any, allowed: Any, _last: int | None) -> int | None:
        words = np.flatnonzero(allowed)
        if not len(words):
            return None
        ids = _ids(allowed, words[rng.randrange(len(words))][None])
        return int(ids[rng.randrange(len(ids))])

    return choose


def _first(allowed: Any) -> int | None:
    words = np.flatnonzero(allowed)
    return int(_ids(allowed, words[:1])[0]) if len(words) else None


def _ids(allowed: Any, words: Any) -> Any:
    """The token ids that some words of a mask allow."""
    bits = np.unpackbits(allowed[words].view(np.uint8), bitorder="little")
    places = np.flatnonzero(bits)
    return words[places // _WORD_BITS] * _WORD_BITS + places % _WORD_BITS


def _bits(info: Any, stops: Sequence[int] | None, words: int) -> Any:
    """A mask of all tokens that are text, neither a stop nor a special one."""
    is_text = [True] * info.vocab_size
    for ids in (info.stop_token_ids, info.special_token_ids, stops or ()):
        for token in ids:
            is_text[token] = False
    return _packed(is_text, words)


def _packed(chosen: Sequence[bool], words: int) -> Any:
    bits = np.zeros(words * _WORD_BITS, dtype=np.uint8)
    bits[: len(chosen)] = chosen
    return np.packbits(bits, bitorder="little").view(np.int32)


def _has_nul(kind: str, source: str) -> bool:
    return "\0" in source or (kind in {"json_schema", "structural_tag"} and "\\u0000" in source)


def _begins(tag: Any) -> dict[str, str]:
    """The beginnings of all tags by their content, in either form of a structural tag."""
    begins: dict[str, str] = {}
    for inner in tag.values() if isinstance(tag, dict) else tag if isinstance(tag, list) else ():
        begins |= _begins(inner)
    if isinstance(tag, dict) and isinstance(tag.get("begin"), str):
        content = {name: value for name, value in tag.items() if name not in {"begin", "end"}}
        begins[json.dumps(content)] = tag["begin"]
    return begins


def _structural_tag(source: str) -> Any:
    """A structural tag as SGLang's constrained/xgrammar_backend.py reads it: legacy, or xgrammar's own."""
    tag = json.loads(source)
    if "structures" not in tag:
        return source
    items = [
        xgrammar.StructuralTagItem(begin=s["begin"], schema=json.dumps(s["schema"] or {}), end=s["end"])
        for s in tag["structures"]
    ]
    converted = xgrammar.StructuralTag.from_legacy_structural_tag(items, tag["triggers"])
    converted.format.at_least_one = tag.get("at_least_one", False)
    return converted


def _reason(exc: Exception) -> str:
    """The first line of xgrammar's message, without its time and source position."""
    message = (str(exc).strip() or type(exc).__name__).splitlines()[0]
    return re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", message)[:200]
