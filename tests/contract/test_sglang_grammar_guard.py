"""The guard in SGLang's scheduler, on SGLang's own grammar objects: it counts, ends and leaves behind."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import pytest

from app.engine.sglang.stall_limit import StallLimit

pytestmark = pytest.mark.sglang

NESTED = "((a{0,999}){0,999}){0,999}"


@pytest.fixture(scope="module")
def compiled() -> Any:
    """SGLang's grammars over single bytes, by regex."""
    from app.engine.sglang.platform import prepare_process

    prepare_process()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # imports warn of hardware that this machine does not have
        import xgrammar
        from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

        import app.engine.sglang.patches.grammar_guard  # noqa: F401

    def make(regex: str, *, longest: int = 8) -> Any:
        """With tokens of up to so many letters `a`: a mask tries each of them."""
        letters = (b"a" * n for n in range(2, longest + 1))
        tokens = [*(bytes([value]) for value in range(256)), *letters, b"<end>"]
        info = xgrammar.TokenizerInfo(tokens, xgrammar.VocabType.RAW, stop_token_ids=[len(tokens) - 1])
        grammar = xgrammar.GrammarCompiler(info).compile_regex(regex)
        return XGrammarGrammar(xgrammar.GrammarMatcher(grammar), len(tokens), grammar, None)

    return make


@dataclass
class Request:
    """What the guard asks of SGLang's `Req`."""

    rid: str
    grammar: Any

    def finished(self) -> bool:
        return False


@dataclass
class Running:
    """What it asks of SGLang's scheduler."""

    requests: list[Request]

    def collect_inflight_reqs(self) -> list[Request]:
        return self.requests


class Rank:
    """One rank's end of what all tell one another."""

    def __init__(self, told: set[str], *, is_first: bool) -> None:
        self._told = told
        self.is_first = is_first

    def set(self, key: str) -> None:
        self._told.add(key)

    def has(self, key: str) -> bool:
        return key in self._told


def step(guard: Any, grammars: list[Any], token: int) -> Any:
    """One step of all: masks, then the same token for each."""
    from sglang.srt.constrained.base_grammar_backend import GrammarRow

    mask = grammars[0].allocate_vocab_mask(grammars[0].vocab_size, len(grammars), "cpu")
    rows = [_Counted(guard, grammar) for grammar in grammars]
    guard.fill_batched([GrammarRow(row, counted) for row, counted in enumerate(rows)], mask)
    for grammar in grammars:
        guard.accept(grammar, lambda grammar=grammar: grammar.accept_token(token))
    return mask


class _Counted:
    """A grammar whose masks are counted, as `install` makes it for all."""

    def __init__(self, guard: Any, grammar: Any) -> None:
        self._guard = guard
        self.grammar = grammar

    def fill_vocab_mask(self, mask: Any, row: int) -> None:
        self._guard.fill(self.grammar, lambda: self.grammar.fill_vocab_mask(mask, row))


def test_the_slow_one_alone_is_ended(compiled: Any):
    """Of two in a batch the costly one gets an abort that says what it cost."""
    from app.engine.grammar.cost import GRAMMAR_ENDED
    from app.engine.sglang.patches.grammar_guard import GrammarGuard

    guard = GrammarGuard(1.0, StallLimit())
    slow, good = compiled(NESTED), compiled("a*")
    running = Running([Request("slow", slow), Request("good", good)])
    aborts: list[Any] = []
    for _ in range(200):
        step(guard, [slow, good], ord("a"))
        if aborts := guard.aborts(running):
            break
    assert [abort.rid for abort in aborts] == ["slow"]
    assert aborts[0].abort_message.startswith(GRAMMAR_ENDED)
    assert "1 ms a token" in aborts[0].abort_message


def test_a_mask_that_stalls_is_left_behind(compiled: Any):
    """The step goes on, the other's mask is right, and the request is ended."""
    from app.engine.sglang.patches.grammar_guard import GrammarGuard

    slow, good = compiled(NESTED, longest=130), compiled("a*", longest=130)
    for _ in range(40):
        slow.accept_token(ord("a"))
    began_s = time.thread_time()
    mask = slow.allocate_vocab_mask(slow.vocab_size, 1, "cpu")
    slow.fill_vocab_mask(mask, 0)
    took_s = time.thread_time() - began_s
    guard = GrammarGuard(1.0, StallLimit(took_s / 20), poll_s=took_s / 50)
    mask = step(guard, [slow, good], ord("a"))
    right = good.allocate_vocab_mask(good.vocab_size, 1, "cpu")
    good.fill_vocab_mask(right, 0)
    assert (mask[1] == right[0]).all()
    running = Running([Request("slow", slow), Request("good", good)])
    [abort] = guard.aborts(running)
    assert abort.rid == "slow"
    assert "one of its tokens took more than 0.5 s" in abort.abort_message
    step(guard, [slow, good], ord("a"))  # its matcher is not touched any more


def test_another_rank_leaves_what_the_first_has_left(compiled: Any):
    """Its own clock would have it wait for minutes."""
    from app.engine.sglang.patches.grammar_guard import GrammarGuard

    told: set[str] = set()
    first = StallLimit(store=Rank(told, is_first=True))
    first.begin_step()
    first.leave(0)
    guard = GrammarGuard(1.0, StallLimit(store=Rank(told, is_first=False)), poll_s=0.001)
    slow, good = compiled(NESTED, longest=130), compiled("a*", longest=130)
    for _ in range(40):
        slow.accept_token(ord("a"))
    mask = step(guard, [slow, good], ord("a"))
    right = good.allocate_vocab_mask(good.vocab_size, 1, "cpu")
    good.fill_vocab_mask(right, 0)
    assert (mask[1] == right[0]).all()
    assert slow.request_meter.stalled
    assert not good.request_meter.stalled


def test_many_cheap_grammars_are_left_alone(compiled: Any):
    """256 that share a step have little each, and need less."""
    from app.engine.sglang.patches.grammar_guard import GrammarGuard

    guard = GrammarGuard(2.0, StallLimit())
    grammars = [compiled("[a-z]*") for _ in range(256)]
    for _ in range(20):
        step(guard, grammars, ord("a"))
    assert not guard.aborts(Running([Request(str(n), grammar) for n, grammar in enumerate(grammars)]))


def test_a_refused_token_tells_no_text(compiled: Any):
    """SGLang logs the error: it has neither the grammar nor the tokens so far."""
    from app.engine.sglang.patches.grammar_guard import GrammarGuard

    guard, grammar = GrammarGuard(2.0, StallLimit()), compiled("canary")
    with pytest.raises(ValueError, match=r"^the grammar does not allow the token$"):
        guard.accept(grammar, lambda: grammar.accept_token(ord("z")))
