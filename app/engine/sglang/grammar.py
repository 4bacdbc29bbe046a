"""The check of a grammar, whether it can be followed and at what cost to everyone, before it is sent.

SGLang compiles it in the scheduler, after the status line, logs the source of one that fails (it is the
caller's text), and computes each token's mask in the step that all requests share. Here a process that
can be killed compiles it first, over the model's own vocabulary, and walks it ahead
(app.engine.grammar.walk). Verdicts are kept by the hash of the grammar.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import orjson

from app.engine.grammar.cost import GrammarBudget
from app.engine.grammar.pool import GrammarVerdict, WorkerPool, WorkerSetup
from app.errors import BadRequest, GrammarTooSlow, UnsupportedParameter

KINDS = ("json_schema", "regex", "ebnf", "structural_tag")
"""The sampling parameters of SGLang that hold a grammar."""
MAX_SOURCE_CHARS = 64 * 1024
MAX_JSON_CHARS = 256 * 1024
"""Characters of a grammar, at most; of JSON without its annotations. 128 tools of 30 properties have 133,000.

Compiling takes time by the square of one schema's optional properties: seconds, for 3,000.
"""
JSON_KINDS = frozenset({"json_schema", "structural_tag"})
WALK_TOKENS = (64, 512)
"""Tokens that a grammar is walked ahead: the least of these that covers the answer, or the last."""
MAX_VERDICTS = 4096
ADVICE = "Make repetitions bounded and smaller, nest fewer of them, and let no text match in two ways."

_ANY_JSON = "$$ANY$$"


class _Grammar(NamedTuple):
    """A grammar of a request, and the parameter that errors name."""

    kind: str
    source: str
    param: str


class GrammarCheck:
    """Refuses grammars that cannot be followed or cost too much; belongs to one event loop.

    Without `setup` it refuses every grammar, and says how the model is `served`; if that is empty too, none.
    """

    def __init__(self, setup: WorkerSetup | None, served: str = "") -> None:
        self._pool = None if setup is None else WorkerPool(setup)
        self._served = served
        self._verdicts: OrderedDict[bytes, GrammarVerdict] = OrderedDict()
        self._checks: dict[bytes, asyncio.Task[GrammarVerdict]] = {}

    async def start(self) -> None:
        """Start a worker. Raises InternalError where that fails."""
        if self._pool is not None:
            await self._pool.start()

    async def aclose(self) -> None:
        """Kill the workers; a second call does nothing."""
        for task in list(self._checks.values()):
            task.cancel()
        await asyncio.gather(*self._checks.values(), return_exceptions=True)
        if self._pool is not None:
            await self._pool.aclose()

    async def check(self, owner: str, sampling: Mapping[str, Any], request: Any) -> None:
        """Raise BadRequest, naming the parameter, unless the grammar in `sampling` passes.

        `sampling` are SGLang's sampling parameters, made of the chat request; errors of a tool grammar
        name `tools`. Raises Overloaded where the owner, or all together, have too many new grammars, and
        UnsupportedParameter where the model is served without grammars.
        """
        if self._pool is None:
            self._check_served(sampling, request)
            return
        grammar = _grammar(sampling, grammar_param(request))
        if grammar is None:
            return
        limit = MAX_JSON_CHARS if grammar.kind in JSON_KINDS else MAX_SOURCE_CHARS
        if len(grammar.source) > limit:
            raise BadRequest(f"{grammar.param}: the grammar is over {limit} characters.", param=grammar.param)
        tokens = _walk_tokens(sampling.get("max_new_tokens"))
        _raise(await self._verdict(self._pool, owner, grammar, tokens), grammar.param)

    def _check_served(self, sampling: Mapping[str, Any], request: Any) -> None:
        kind = next((kind for kind in KINDS if sampling.get(kind) is not None), None)
        if kind is not None and self._served:
            param = grammar_param(request) or kind
            raise UnsupportedParameter(
                f"{param}: this model is served {self._served}, so an answer cannot be constrained."
                " Leave it out; tools can be sent with `tool_choice` auto and without `strict`.",
                param=param,
            )

    async def _verdict(self, pool: WorkerPool, owner: str, grammar: _Grammar, tokens: int) -> GrammarVerdict:
        key = _key(grammar, tokens)
        verdict = self._verdicts.get(key)
        if verdict is not None:
            self._verdicts.move_to_end(key)
            return verdict
        check = self._checks.get(key)
        if check is None:
            # A task of its own: a client that leaves does not cost the worker, nor others the verdict.
            check = asyncio.create_task(pool.check(owner, grammar.kind, grammar.source, tokens))
            self._checks[key] = check
            check.add_done_callback(lambda task: self._keep(key, task))
        return await asyncio.shield(check)

    def _keep(self, key: bytes, check: asyncio.Task[GrammarVerdict]) -> None:
        del self._checks[key]
        if not check.cancelled() and check.exception() is None and check.result().outcome != "late":
            self._verdicts[key] = check.result()
            if len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)


def grammar_check(
    manager: Any, backend: str, *, any_whitespace: bool, speculative: bool, budget: GrammarBudget
) -> GrammarCheck:
    """The check for a model with this backend of grammars; it passes all where their cost is not known here.

    `manager` is SGLang's tokenizer manager. Blocks for 0.3 s with a vocabulary of 128,000 tokens.
    """
    if backend not in ("xgrammar", "none"):
        return GrammarCheck(None)
    setup = worker_setup(manager, any_whitespace=any_whitespace, budget=budget) if backend != "none" else None
    return GrammarCheck(setup, "with speculative decoding" if speculative else "without grammars")


def worker_setup(manager: Any, *, any_whitespace: bool, budget: GrammarBudget) -> WorkerSetup | None:
    """The vocabulary as SGLang's XGrammarGrammarBackend makes it; None where SGLang has no grammars."""
    import xgrammar

    tokenizer, config = manager.tokenizer, manager.model_config
    stop_token_ids: tuple[int, ...] | None = None
    if hasattr(tokenizer, "init_xgrammar"):
        info, override = tokenizer.init_xgrammar()
        if override is not None:
            stop_token_ids = (override,) if isinstance(override, int) else tuple(override)
    else:
        ends = list(config.hf_eos_token_id or ()) or None
        try:
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=config.vocab_size, stop_token_ids=ends
            )
        except Exception:  # noqa: BLE001  # what SGLang catches; it then does without grammars
            return None
    if info is None:
        return None
    return WorkerSetup(info.serialize_json(), any_whitespace, stop_token_ids, budget)


def grammar_param(request: Any) -> str | None:
    """The parameter of a chat request that its grammar comes from; None where it has none."""
    for name in ("regex", "ebnf"):
        if getattr(request, name):
            return name
    formed = request.response_format
    return "response_format" if formed and formed.type != "text" else "tools" if request.tools else None


def _grammar(sampling: Mapping[str, Any], param: str | None) -> _Grammar | None:
    for kind in KINDS:
        source = sampling.get(kind)
        if source is not None and source != _ANY_JSON:
            return _Grammar(kind, source, param or kind)
    return None


def _walk_tokens(max_tokens: int | None) -> int:
    return next((tokens for tokens in WALK_TOKENS if max_tokens and max_tokens <= tokens), WALK_TOKENS[-1])


def _key(grammar: _Grammar, tokens: int) -> bytes:
    """The hash of a grammar and its walk; of JSON without its white space, whose order matters."""
    source = grammar.source.encode("utf-8", "surrogatepass")
    if grammar.kind in JSON_KINDS:
        with contextlib.suppress(orjson.JSONDecodeError):  # xgrammar will say what is wrong with it
            source = orjson.dumps(orjson.loads(source))
    return hashlib.blake2b(b"%s %d " % (grammar.kind.encode(), tokens) + source, digest_size=16).digest()


def _raise(verdict: GrammarVerdict, param: str) -> None:
    if verdict.outcome == "invalid":
        raise BadRequest(f"{param}: not a valid grammar: {verdict.reason}", param=param)
    if verdict.outcome == "empty":
        raise BadRequest(f"{param}: no text matches this grammar.", param=param)
    if verdict.outcome in ("slow", "late"):
        raise GrammarTooSlow(f"{param}: this grammar is too slow: {verdict.reason}. {ADVICE}", param=param)
