"""ScriptedEngine: deterministic tokens, delays and faults; no model.

For tests, and for measuring everything that is not the engine. What it says is a function
of seed, prompt and choice alone; when it says it, and how it fails, is the `Script`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
import zlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

from app.core import (
    ChatRequest,
    Counts,
    Delta,
    EngineLoad,
    FinishReason,
    Health,
    ModelCard,
    Prompt,
    ToolCall,
)
from app.engine.request_limits import answer_budget, check_text_only
from app.engine.scripted.service import Run, Service, ServiceRates
from app.engine.scripted.vocabulary import Vocabulary, prompt_ids, reused_runs, token_id
from app.engine.sink import Tallies
from app.errors import EngineFailed, EngineNotReady, EngineOverloaded
from app.settings import SettingsError

_SENTENCE = (
    "a ring holds each token once and every reader follows at its own pace so that nothing is lost"
    ' when the line drops naïve 世界 😀 "quoted" back\\slash <tag> & done'
)
_WORDS = (*_SENTENCE.split(), "tab\tnew\nline", "e\u0301", "\u05e9\u05dc\u05d5\u05dd")
_TEXTS = {token_id(word): word + " " for word in _WORDS}
"""The words that answers are made of, by their ids."""
_REMEMBERED_PAGES = 4096
_FAULTS = ("", "fail", "die", "hang", "overload", "miscount")
_FINISHES = ("stop", "length")


@dataclass(frozen=True, slots=True)
class Script(ServiceRates):
    """The course of one answer. `rate` is tokens per second; 0 is as fast as the loop turns.

    `fault` happens after `fault_after` tokens: `fail` breaks this answer, `die` the engine,
    `hang` sends nothing more until aborted, `overload` refuses instead of the first token;
    `miscount` claims one token more of the first choice than was handed over, from then on.
    """

    rate: float = 0.0
    tokens: int = 64
    seed: int = 0
    prefill_s: float = 0.0
    start_s: float = 0.0
    reasoning: int = 0
    tool: str = ""
    finish: str = "stop"
    fault: str = ""
    fault_after: int = 0
    context: int = 32_768
    pool: int = 0
    """KV tokens; 0 has 64 contexts."""

    @property
    def pool_tokens(self) -> int:
        """The size of the KV pool."""
        return self.pool or self.context * 64

    @property
    def shared(self) -> bool:
        """True if requests share one service, and not `rate`; it takes one of three rates to have one.

        Answers with `ignore_eos` have all of their `max_tokens` then.
        """
        return bool(self.prefill_rate or self.step_s or self.step_per_request_s)

    @classmethod
    def parse(cls, text: str) -> Script:
        """A script from `"rate=50,tokens=200,seed=1"`. Raises SettingsError."""
        kinds = {f.name: type(getattr(cls(), f.name)) for f in dataclasses.fields(cls)}
        values: dict[str, Any] = {}
        for item in filter(None, text.split(",")):
            name, _, raw = item.partition("=")
            if name not in kinds:
                raise SettingsError(f"--scripted: unknown key {name!r}; known: {', '.join(kinds)}")
            try:
                values[name] = kinds[name](raw)
            except ValueError as exc:
                raise SettingsError(f"--scripted: {name}={raw!r} is no {kinds[name].__name__}") from exc
        script = cls(**values)
        if script.fault not in _FAULTS or script.finish not in _FINISHES:
            raise SettingsError(f"--scripted: fault is one of {_FAULTS}, finish one of {_FINISHES}")
        return script


@dataclass(frozen=True, slots=True)
class _ScriptedAnswer:
    request: ChatRequest
    script: Script
    prompt_tokens: int
    cached_tokens: int
    max_tokens: int
    continued: Sequence[Sequence[int]] = ()
    """The ids that each choice began with, as in `Prompt`."""


class ScriptedEngine:
    """An engine without a model; see the module."""

    def __init__(
        self,
        script: Script | Callable[[ChatRequest], Script],
        *,
        name: str = "scripted",
        on_death: Callable[[str], None] = lambda _reason: None,
    ) -> None:
        self._script_for = script if callable(script) else lambda _request: script
        self._default = script if isinstance(script, Script) else Script()
        self._on_death = on_death
        self._health = Health.STARTING
        self._runs: dict[str, Run] = {}
        self._tallies = Tallies()
        self._seen_prefixes: dict[int, None] = {}
        self._vocabulary = Vocabulary()
        self._used_tokens = 0
        script = self._default
        self._service = Service(script, script.pool_tokens, script.seed) if script.shared else None
        self._card = ModelCard(
            id=name,
            context_length=self._default.context,
            kv_capacity_tokens=self._default.pool_tokens,
            max_prompt_tokens=self._default.context - 1,
            capabilities=frozenset({"tools", "reasoning"}),
        )

    @property
    def model(self) -> ModelCard:
        return self._card

    async def start(self) -> None:
        """Become ready after the script's `start_s`."""
        await asyncio.sleep(self._default.start_s)
        self._health = Health.READY

    def tokenizer_json(self) -> None:
        """No tokenizer: ids are made of words."""

    async def tokenize(self, owner: str, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        del owner, add_special_tokens
        return self._vocabulary.ids(text)

    async def detokenize(
        self, owner: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        del owner, skip_special_tokens
        return self._vocabulary.text(token_ids)

    async def render(self, request: ChatRequest) -> Prompt:
        """Ids made from the words of the messages. Raises ContextOverflow, BadRequest."""
        check_text_only(request)
        script = self._script_for(request)
        if request.raw is None:
            token_ids = list(prompt_ids(request.body["messages"]))
        else:
            token_ids = self._vocabulary.raw_ids(request.raw)
            script = dataclasses.replace(script, reasoning=0, tool="")
        max_tokens = answer_budget(len(token_ids), request.max_tokens, self._card)
        cached_tokens = self._cached_tokens(token_ids, request.placement.cache_salt)
        answer = _ScriptedAnswer(request, script, len(token_ids), cached_tokens, max_tokens)
        past_runs, rerendered = reused_runs(token_ids, request.past)
        return Prompt(
            token_ids, max_tokens, answer, past_runs, rerendered, space=request.placement.cache_salt
        )

    def _cached_tokens(self, token_ids: Sequence[int], salt: str) -> int:
        """Tokens of the longest prefix seen before with the salt, by 16-token pages; remembers it."""
        cached, digest = 0, zlib.crc32(salt.encode())
        for start in range(0, len(token_ids) - 16, 16):
            digest = zlib.crc32(repr(token_ids[start : start + 16]).encode(), digest)
            if digest in self._seen_prefixes:
                cached = start + 16
            self._seen_prefixes[digest] = None
        while len(self._seen_prefixes) > _REMEMBERED_PAGES:
            del self._seen_prefixes[next(iter(self._seen_prefixes))]
        return cached

    def generate(self, rid: str, prompt: Prompt) -> AsyncIterator[Delta]:
        """Generate the choices of `prompt`, interleaved token by token."""
        if self._health is not Health.READY:
            raise EngineNotReady(f"The engine is {self._health.value}.", retry_after_s=5)
        answer = dataclasses.replace(prompt.handle, continued=prompt.continued)
        known_tokens = sum(map(len, answer.continued))
        run = self._runs[rid] = Run(answer.prompt_tokens + known_tokens, answer.cached_tokens)
        return self._generate(rid, run, answer)

    async def _generate(self, rid: str, run: Run, answer: _ScriptedAnswer) -> AsyncIterator[Delta]:
        script = answer.script
        live = {choice: self._deltas(answer, choice) for choice in range(answer.request.n)}
        repeated = {choice: len(ids) for choice, ids in enumerate(answer.continued)}
        counts = dict.fromkeys(live, Counts(answer.prompt_tokens, 0, answer.cached_tokens, 0))
        self._used_tokens += answer.prompt_tokens
        tally = self._tallies.begin(rid)
        try:
            await self._pause(run, script.prefill_s)
            if self._service is not None:
                self._service.enter(run)
                await run.woken()
            made = 0
            while live:
                self._inject_fault(run, script, made)
                if script.fault == "hang" and made >= script.fault_after:
                    await self._pause(run, 1e6)
                # The ids of an earlier run are first, of all choices, and as fast as the loop turns.
                behind = [choice for choice in live if repeated.get(choice, 0) > made]
                for choice in behind or list(live):
                    delta = _aborted(choice, counts[choice]) if run.aborted else next(live[choice])
                    counts[choice] = delta.counts
                    if delta.finish_reason is not None:
                        del live[choice]
                    tally.add(len(delta.token_ids))
                    yield delta
                made += 1
                if behind:
                    await self._pause(run, 0.0)
                elif self._service is None:
                    await self._pause(run, 1 / script.rate if script.rate else 0.0)
                elif live:
                    self._service.next_tokens(run, len(live))
                    await run.woken()
        finally:
            if self._service is not None:
                self._service.leave(run)
            self._used_tokens -= answer.prompt_tokens
            del self._runs[rid]
            self._tallies.end(rid)

    def _deltas(self, answer: _ScriptedAnswer, choice: int) -> Iterator[Delta]:
        """All deltas of one choice, the last with a finish reason."""
        return _choice(answer, choice)

    async def _pause(self, run: Run, duration_s: float) -> None:
        """Wait, less long when aborted. Raises EngineFailed when the engine dies meanwhile."""
        if run.aborted:
            return
        if duration_s <= 0:
            await asyncio.sleep(0)
        else:
            timer = asyncio.get_running_loop().call_later(duration_s, run.wake)
            await run.woken()
            timer.cancel()
        if run.error is not None:
            raise run.error

    def _inject_fault(self, run: Run, script: Script, made: int) -> None:
        if not script.fault or made < script.fault_after or run.aborted:
            return
        if script.fault == "overload":
            raise EngineOverloaded("The scripted engine is full.", retry_after_s=1)
        if script.fault == "fail":
            raise EngineFailed("The scripted engine failed.")
        if script.fault == "die":
            self.die("scripted")
            raise EngineFailed("The scripted engine died.")

    def die(self, reason: str) -> None:
        """End as an engine whose process was killed: every generation fails at once."""
        self._end("The scripted engine died.")
        self._on_death(reason)

    def abort(self, rid: str) -> None:
        run = self._runs.get(rid)
        if run is not None:
            run.abort()

    def pop_emitted_tokens(self, rid: str) -> int:
        return self._tallies.pop(rid)

    def load(self) -> EngineLoad:
        running, capacity, service = len(self._runs), self._card.kv_capacity_tokens, self._service
        if service is None:
            return EngineLoad(running, 0, self._used_tokens, capacity, 0.0)
        waiting, used = service.num_waiting, service.used_tokens
        return EngineLoad(
            running - waiting, waiting, used, capacity, 0.0, num_retractions=service.num_retractions
        )

    def health(self) -> Health:
        return self._health

    async def aclose(self) -> None:
        """End; generations in progress fail."""
        if self._health is not Health.DEAD:
            self._end("The server is stopping.")

    def _end(self, reason: str) -> None:
        self._health = Health.DEAD
        self._seen_prefixes.clear()
        for run in self._runs.values():
            run.fail(reason)


def scripted_text(seed: int, choice: int, tokens: int) -> list[str]:
    """The words of a plain scripted answer, one a token."""
    return list(islice(_words(seed, choice), tokens))


def _words(seed: int, choice: int) -> Iterator[str]:
    """The words of an endless answer, each made when it is due: a long answer begins as fast as any."""
    rng = random.Random(f"{seed}:{choice}")  # noqa: S311  # reproducible, not secret
    while True:
        yield rng.choice(_WORDS) + " "


def _choice(answer: _ScriptedAnswer, choice: int) -> Iterator[Delta]:
    script, body = answer.script, answer.request.body
    length = answer.max_tokens if script.shared and body.get("ignore_eos") else script.tokens
    earlier = [_TEXTS[token_id] for token_id in answer.continued[choice]] if answer.continued else []
    later = islice(_words(body.get("seed", script.seed), choice), len(earlier), None)
    length = max(length, len(earlier))
    budget = min(length, answer.max_tokens)
    cut = _Stop(body.get("stop") or ())
    miscounted = script.fault_after if script.fault == "miscount" and choice == 0 else budget
    counts = Counts(answer.prompt_tokens, 0, answer.cached_tokens, 0)
    for index, word in enumerate(islice(chain(earlier, later), budget), start=1):
        thinking = index <= script.reasoning
        claimed = index + (index > miscounted)
        counts = Counts(answer.prompt_tokens, claimed, answer.cached_tokens, min(index, script.reasoning))
        text = word if thinking else cut.kept(word)
        token_ids = (token_id(word.rstrip(" ")),)
        yield Delta(choice, "reasoning" if thinking else "text", text, token_ids, counts)
        if cut.hit is not None:
            yield Delta(choice, "text", "", (), counts, "stop", matched_stop=cut.hit)
            return
    ending: FinishReason = "length" if budget < length or script.finish == "length" else "stop"
    if script.tool:
        call = ToolCall(0, f"call_{choice:024d}", script.tool)
        yield Delta(choice, "tool", "", (), counts, tool=call)
        yield Delta(choice, "tool", '{"city": "Paris"}', (), counts, tool=ToolCall(0))
        ending = "tool_calls"
    yield Delta(choice, "text", "", (), counts, ending)


class _Stop:
    """Cuts text at the first stop string; one that spans words is cut where it ends."""

    def __init__(self, stops: str | Sequence[str]) -> None:
        self._stops = (stops,) if isinstance(stops, str) else tuple(stops)
        self._text = ""
        self.hit: str | None = None

    def kept(self, word: str) -> str:
        if not self._stops:
            return word
        previous, self._text = self._text, self._text + word
        self.hit = next((s for s in self._stops if s in self._text), None)
        if self.hit is None:
            return word
        return self._text.split(self.hit)[0][len(previous) :]


def _aborted(choice: int, counts: Counts) -> Delta:
    return Delta(choice, "text", "", (), counts, "abort")
