"""The value types of one request and the `Engine` protocol: the vocabulary of every layer.

Standard library only. A request becomes a `ChatRequest`, is rendered into a
`Prompt`, and returns as a sequence of `Delta`s; everything between engine
and client is stated in these types.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple, Protocol, get_args

Channel = Literal["text", "reasoning", "tool"]
"""The kind of a delta's text: answer, reasoning, or the arguments of a tool call."""

FinishReason = Literal["stop", "length", "tool_calls", "content_filter", "abort"]
"""`abort`: a caller or the server stopped the answer. Clients are shown `known_finish` of it."""


def known_finish(reason: str | None) -> str | None:
    """A finish reason as answers show it. OpenAI's clients know no `abort`; such an answer was stopped."""
    return "stop" if reason == "abort" else reason


class Counts(NamedTuple):
    """Cumulative token counts of one choice, as the engine states them.

    `cached_tokens` is a part of `prompt_tokens`, `reasoning_tokens` of `completion_tokens`.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0


class Usage(NamedTuple):
    """The tokens of a request. Cached ones are among the prompt's, the last two among the completion's."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    withheld_tokens: int = 0
    """Generated, and not released to anyone."""

    @property
    def reported_tokens(self) -> int:
        """Tokens of the prompt, and of the answer as far as it was released."""
        return self.prompt_tokens + self.completion_tokens - self.withheld_tokens

    @property
    def all_withheld(self) -> bool:
        """True if there is an answer, and nothing of it was released."""
        return 0 < self.completion_tokens == self.withheld_tokens


def total_counts(counts: Mapping[int, Counts]) -> Counts:
    """The counts of all choices together; the prompt, which they share, is that of the lowest."""
    if len(counts) == 1:
        return next(iter(counts.values()))
    shared = counts[min(counts)] if counts else Counts()
    return shared._replace(
        completion_tokens=sum(c.completion_tokens for c in counts.values()),
        reasoning_tokens=sum(c.reasoning_tokens for c in counts.values()),
    )


@dataclass(frozen=True, slots=True)
class ToolCall:
    """The tool call that a delta belongs to. `id` and `name` are set once, in its first fragment."""

    index: int
    id: str | None = None
    name: str | None = None


class Delta(NamedTuple):
    """A step of one choice: incremental text, cumulative counts.

    `token_ids` are the ids generated since the choice's last delta, held by exactly one of
    the deltas made from them. `logprobs` are entries of OpenAI's `logprobs.content`.
    Exactly one delta of a choice, its last, has a `finish_reason`, after an abort too.
    """

    choice: int
    channel: Channel
    text: str
    token_ids: Sequence[int]
    counts: Counts
    finish_reason: FinishReason | None = None
    logprobs: Sequence[Mapping[str, Any]] | None = None
    tool: ToolCall | None = None
    matched_stop: str | int | None = None


ANY_BODY = b""
"""In the place of a fingerprint: the body is not known yet."""


@dataclass(frozen=True, slots=True)
class IdempotencyKey:
    """A caller's key and the fingerprint of the body it was first used with."""

    key: str
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class Placement:
    """The server's own findings and decisions about a request; nothing of it is the caller's."""

    cache_salt: str = ""
    """Requests of one salt share what the engine has cached."""
    priority: int = 10
    """Higher ones are served first by the engine, and set aside last; from the key's tier."""
    socket_wait_s: float = 0.0
    """Seconds between the request's last bytes and their being read: over 0 while the process is busy."""
    body_bytes: int = 0
    """The size of its body."""
    response_headers: Mapping[str, str] = field(default_factory=dict)
    """Headers of its answer: which model was chosen for it and why, and where it got less than asked for."""
    length_capped: bool = False
    """True if `max_tokens` is the server's, in degraded mode, and not the caller's."""


UNPLACED = Placement()


@dataclass(frozen=True, slots=True)
class RawPrompt:
    """A prompt that the model reads as it is, without a chat template.

    `token_ids` are the caller's, and `text` is what they decode to. Where they are None, the engine makes
    them of `text`, with the special tokens that its tokenizer adds. `preface` is the operator's, in front.
    """

    text: str
    token_ids: Sequence[int] | None = None
    preface: str = ""


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """A validated chat completion request.

    `body` is the parsed JSON body with parameters spelled as OpenAI and SGLang spell them,
    less those that only the server itself reads. The engine takes messages, sampling,
    tools and formats from it; the fields beside it are what the stages in between need.

    `moderated` asks for OpenAI's `moderation` object with the answer (app.safety.moderation).

    A request that is stored has a `conversation_id` and a `message_id`, its answer's; one that
    is not has neither. Its messages hang below `parent_id`.
    `past` are runs of token ids, oldest first: each a past turn's prompt after the run before
    it, and its answer. Where the rendered text begins with theirs, the engine takes them over.

    A request with a `raw` prompt has that prompt's text as the only message in `body`, a user's, for all
    stages that read text; the engine renders `raw` in the message's place.
    """

    request_id: str
    owner: str
    model: str
    body: Mapping[str, Any]
    created_at_unix_s: int
    n: int = 1
    max_tokens: int | None = None
    include_usage: bool = False
    continuous_usage: bool = False
    logprobs: bool = False
    moderated: bool = False
    idempotency: IdempotencyKey | None = None
    conversation_id: str | None = None
    message_id: str | None = None
    parent_id: str | None = None
    new_conversation: bool = False
    past: Sequence[Sequence[int]] = ()
    raw: RawPrompt | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)
    """The caller's own names and values, by which usage can be grouped."""
    strict: bool = False
    """True if a parameter that would have no effect is refused."""
    caller_names: Mapping[str, str] = field(default_factory=dict)
    """The caller's own names of the parameters in `body` that it sent under those of another server."""
    resumable: bool = False
    """True if its client may resume a stream that it has left: something in the request says so."""
    traceparent: str = ""
    """The caller's trace, in W3C's format, which the request's spans continue."""
    placement: Placement = UNPLACED

    def with_placement(self, **changes: Any) -> ChatRequest:
        """The request with other fields of its placement."""
        return replace(self, placement=replace(self.placement, **changes))


@dataclass(frozen=True, slots=True)
class Prompt:
    """A rendered request: what the model reads, and the engine's own handle to generate from it.

    `token_ids` includes the tokens that images expand to. `max_tokens` is what the engine
    will generate at most, after defaults. It begins with the first `past_runs` runs of the
    request's `past`; `rerendered` says why not with all of them. `unbilled_tokens` of it are
    the operator's text, and free of charge.
    """

    token_ids: Sequence[int]
    max_tokens: int
    handle: Any = field(repr=False)
    past_runs: int = 0
    rerendered: str | None = None
    unbilled_tokens: int = 0
    replica: int | None = None
    """The replica of the model that answers; with None the engine chooses."""
    space: str | None = ""
    """Prompts of one space share what the engine has cached of their beginnings; with None it shares none."""
    continued: Sequence[Sequence[int]] = ()
    """The token ids that each choice has generated already, before its engine or its server ended.

    Empty for a new answer, else one run for each choice. The engine continues behind them. It hands over the
    whole answer, these ids and their text first, and its counts include them."""

    @property
    def billed_tokens(self) -> int:
        """The tokens that the caller is charged for."""
        return len(self.token_ids) - self.unbilled_tokens

    def as_billed(self, counts: Counts) -> Counts:
        """An engine's counts without the tokens that are not billed, which are its first and cached first."""
        return counts._replace(
            prompt_tokens=max(counts.prompt_tokens - self.unbilled_tokens, 0),
            cached_tokens=max(counts.cached_tokens - self.unbilled_tokens, 0),
        )


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A served model: its name, size limits and capabilities."""

    id: str
    context_length: int
    kv_capacity_tokens: int
    max_prompt_tokens: int
    capabilities: frozenset[Literal["vision", "tools", "json_schema", "reasoning", "logprobs"]]
    replicas: int = 1
    """Data parallel replicas, of which `Prompt.replica` is one; each has an equal part of the KV capacity."""


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The load that an engine reports."""

    num_running_reqs: int
    num_queue_reqs: int
    used_tokens: int
    max_total_tokens: int
    gen_throughput_tokens_per_s: float
    max_running_reqs: int = 0
    """Choices that it runs at once, at most; 0 where it does not report that."""
    num_retractions: int = 0
    """Running requests set aside for lack of memory since it started; of those that ended.

    Servers elsewhere do not report that."""
    faults: Mapping[str, int] = field(default_factory=dict)
    """Faults of servers elsewhere, by kind (app.engine.http.server)."""
    replica_used_tokens: Sequence[int] = ()
    """`used_tokens` of each replica; empty where the engine does not say."""
    moved: Mapping[str, int] = field(default_factory=dict)
    """Choices whose server was lost: `resumed` by another one or once it was back, or `ended`."""


Scope = Literal["chat", "admin"]
Tier = Literal["interactive", "standard", "batch"]
SafetyLevel = Literal["observe", "standard", "enforce", "strict"]
Degrading = Literal["on", "off"]
Grammars = Literal["all", "schemas"]
Resuming = Literal["asked", "always"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
TIERS: tuple[Tier, ...] = get_args(Tier)
SAFETY_LEVELS: tuple[SafetyLevel, ...] = get_args(SafetyLevel)
"""The policy observing only, as it is, enforced, or tightened: the operator's word, for each key.

No level loosens the categories that are locked (app.safety.categories)."""
DEGRADING: tuple[Degrading, ...] = get_args(Degrading)
"""The default of a key's requests under pressure: `on` lets degraded mode shorten them, `off` does not."""
GRAMMARS: tuple[Grammars, ...] = get_args(Grammars)
"""The grammars that a key may send: all, or JSON schemas and tools alone."""
RESUMING: tuple[Resuming, ...] = get_args(Resuming)
"""The streams that a client may resume after it has left: those whose request asks for it, or all."""

LOCAL_OWNER = "local"
"""The owner of what is done without a stored key: in open mode, or with the setting `api_key`."""
MIN_WEIGHT, MAX_WEIGHT = 0.1, 100.0


@dataclass(frozen=True, slots=True)
class KeyTerms:
    """The terms of a key, which can be changed. None is no limit; money in micro-dollars, times in us."""

    name: str
    scope: Scope = "chat"
    tier: Tier = "standard"
    weight: float = 1.0
    """The key's share of the tokens served within its tier, relative to the other keys' weights."""
    rpm: int | None = None
    tpm: int | None = None
    max_streams: int | None = None
    budget_micro_usd: int | None = None
    models: tuple[str, ...] | None = None
    expires_at_us: int | None = None
    safety: SafetyLevel = "standard"
    degrade: Degrading = "on"
    grammars: Grammars = "all"
    resume: Resuming = "asked"


class Secret(NamedTuple):
    """One secret of a key, and until when it is valid once another has taken its place."""

    digest: bytes
    ends_at_us: int | None


@dataclass(frozen=True, slots=True)
class Key:
    """A key as it is stored. A revoked one has no secrets."""

    id: str
    owner: str
    terms: KeyTerms
    created_at_us: int
    revoked_at_us: int | None = None
    secrets: tuple[Secret, ...] = ()

    def status(self, at_us: int) -> Literal["active", "expired", "revoked"]:
        """The state of the key at that time."""
        if self.revoked_at_us is not None:
            return "revoked"
        expires_at_us = self.terms.expires_at_us
        return "active" if expires_at_us is None or at_us < expires_at_us else "expired"


class Observes(Protocol):
    """A histogram; app.metering.traffic.Histogram is one."""

    def observe(self, value: float | None, times: int = 1) -> None:
        """Count a value; None is none."""
        ...


class Health(enum.Enum):
    """The state of an engine; it takes work while READY."""

    STARTING = "starting"
    READY = "ready"
    DEAD = "dead"


class Engine(Protocol):
    """One model behind one interface; the contract suite in tests/contract runs over all of them.

    Life: construct, `start()`, serve, `aclose()`. After `start()`, `model` is known.
    """

    @property
    def model(self) -> ModelCard:
        """The served model. Raises EngineNotReady before `start()` has ended."""
        ...

    async def start(self) -> None:
        """Load the model and warm up. Raises EngineFailed with the reason."""
        ...

    def tokenizer_json(self) -> str | None:
        """The model's tokenizer as a tokenizer.json of Hugging Face's; None where it has none.

        For estimates before a request is rendered. Called once, in a thread, after `start()`.
        """
        ...

    async def tokenize(self, owner: str, text: str, *, add_special_tokens: bool) -> Sequence[int]:
        """The token ids of a text, however long it is; owners alternate."""
        ...

    async def detokenize(
        self, owner: str, token_ids: Sequence[int], *, skip_special_tokens: bool = False
    ) -> str:
        """The text of token ids. Raises BadRequest for an id that is not in the vocabulary."""
        ...

    async def render(self, request: ChatRequest) -> Prompt:
        """Template, tokenize and check a request; nothing is sent to the model yet.

        Raises BadRequest (a parameter the model cannot honour, named), ContextOverflow.
        """
        ...

    def generate(self, rid: str, prompt: Prompt) -> AsyncIterator[Delta]:
        """Generate all choices of `prompt`, interleaved as they are generated.

        From this call on, before the first delta too, `abort(rid)` works: so it is no async
        generator itself but returns one. `rid` is of fixed length and used once. The iterator
        ends after the final delta of every choice. Closing it unread is a bug: `abort(rid)`,
        then read on to the final deltas, which have the true counts.

        Raises EngineOverloaded and BadRequest before any delta, EngineFailed at any time.
        """
        ...

    def abort(self, rid: str) -> None:
        """Stop all choices of `rid` at once; unknown and finished ids are ignored."""
        ...

    def pop_emitted_tokens(self, rid: str) -> int:
        """The number of token ids handed over for `rid` so far, all choices together.

        Counted where ids arrive, apart from `Delta.counts`. A finished `rid` is forgotten.
        """
        ...

    def load(self) -> EngineLoad:
        """The engine's current load; cheap enough to call on every request."""
        ...

    def health(self) -> Health:
        """True if the engine lives, without asking it anything."""
        ...

    async def aclose(self) -> None:
        """Stop the engine and free what it holds; a second call does nothing."""
        ...
