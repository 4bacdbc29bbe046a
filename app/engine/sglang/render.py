"""Renders a chat request into SGLang's input, by SGLang's own code with checks in front.

All refusals are made here, before the status line: an unknown or server-owned
parameter, an unreadable image, a grammar that does not compile, a prompt that does not fit.
"""

from __future__ import annotations

import inspect
import re
import secrets
import threading
from collections.abc import Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from copy import copy, deepcopy
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Literal, NoReturn

import orjson
import pydantic
from fastapi import HTTPException
from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat

from app.core import ChatRequest, ModelCard, RawPrompt
from app.engine.request_limits import check_text_only
from app.engine.sglang.args import BUILTIN_TOOL_PARSER
from app.engine.sglang.constraints import check_kept, mend_grammar, prepare_tools
from app.engine.sglang.patches.chat import MeasuredChat, PromptTooLong
from app.engine.sglang.splice import Splice, splice
from app.engine.sglang.tokenizer import TokenizerText
from app.errors import BadRequest, ContextOverflow, InternalError, ServingError, UnsupportedParameter

Capability = Literal["vision", "tools", "json_schema", "reasoning", "logprobs"]

# Fields of SGLang's request that are the server's to set, or that hand out its internals.
SERVER_OWNED = re.compile(
    r"rid|cache_salt|extra_key|priority|lora_path|input_ids|task|custom_logit_processor|custom_params"
    r"|routed_\w+|data_parallel_rank|disagg_\w+|bootstrap_\w+|session_\w+|return_\w+"
)
# Ours, read from `ChatRequest`; what SGLang would do with them does not apply.
REPLACED = frozenset(
    {"n", "stream", "stream_options", "model", "user", "max_tokens", "max_completion_tokens"}
)
# `reasoning` is read by a validator of SGLang's request without being one of its fields.
KNOWN_FIELDS = frozenset(ChatCompletionRequest.model_fields) | {"reasoning"}
MEDIA_PARTS = frozenset({"image_url", "video_url", "audio_url"})
MAX_CHOICES = 128
SEEDS = 2**64
"""SGLang keeps a batch's seeds in an int64 tensor; a number that it does not hold ends the scheduler."""
MAX_TOOLS_BYTES = 1024**2
"""Bytes of JSON: as text it would fill a context of 250,000 tokens. SGLang's check takes 2 us a byte."""
BEGINNING_CHARS = 8
"""Characters of a text's beginning for each token that fits; text hardly ever has as many in a token."""
CUT_TOKENS = 256
"""Tokens that a beginning may have more than the same characters in the whole text: those of a cut word."""
PARAM_OF_SAMPLING = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "sampling_seed": "seed",
    "json_schema": "response_format",
}


@dataclass(frozen=True, slots=True)
class RenderLimits:
    """The limits of a prompt: the model's context, and the KV pool that one request can have."""

    context_length: int
    kv_capacity_tokens: int
    max_prompt_tokens: int
    page_size: int
    reserved_tokens: int
    default_max_tokens: int

    def room_tokens(self, prompt_tokens: int) -> int:
        """Tokens that can be generated after a prompt, by the scheduler's own arithmetic."""
        pages = -(-prompt_tokens // self.page_size) * self.page_size
        in_context = min(self.context_length, self.kv_capacity_tokens) - 2 - prompt_tokens
        in_context -= self.reserved_tokens
        return min(in_context, self.kv_capacity_tokens - pages - self.page_size - 1)

    def max_tokens(self, prompt_tokens: int, requested: int | None) -> int:
        """Tokens to generate at most. Raises ContextOverflow saying by how many it is too much."""
        if prompt_tokens > self.max_prompt_tokens:
            self._refuse_prompt(prompt_tokens)
        room = self.room_tokens(prompt_tokens)
        if requested is None:
            return min(room, self.default_max_tokens)
        total = prompt_tokens + requested
        if total > self.context_length:
            raise ContextOverflow(
                f"This model's maximum context length is {self.context_length} tokens, but you asked for "
                f"{total}: {prompt_tokens} in the messages and {requested} in the completion. That is "
                f"{total - self.context_length} too many.",
                param="max_tokens",
            )
        return min(room, requested)

    def check_least(self, tokens: int) -> None:
        """Raise ContextOverflow if a prompt of at least so many tokens cannot fit."""
        if tokens > self.max_prompt_tokens:
            self._refuse_prompt(tokens, "at least ")

    def _refuse_prompt(self, prompt_tokens: int, about: str = "") -> NoReturn:
        excess = prompt_tokens - self.max_prompt_tokens
        if self.kv_capacity_tokens < self.context_length:
            what = f"This server's KV cache holds {self.kv_capacity_tokens} tokens"
        else:
            what = f"This model's maximum context length is {self.context_length} tokens"
        raise ContextOverflow(
            f"{what} and needs some for the answer; your messages are {about}{prompt_tokens} tokens, "
            f"{about}{excess} too many.",
            param="messages",
        )


@dataclass(frozen=True, slots=True)
class Rendered:
    """A prompt's handle: the request to send, tokenized or as a body, and what parsing its output needs."""

    sent: Any
    request: ChatCompletionRequest
    choices: int
    seed: int | None

    def request_of(self, index: int, *, deterministic: bool) -> Any:
        """SGLang's request for one choice, with a seed of its own in deterministic mode."""
        if not deterministic:
            return self.sent
        request = copy(self.sent)
        request.sampling_params = copy(request.sampling_params)
        request.sampling_params.sampling_seed = seed_of_choice(self.seed, index)
        return request


def seed_of_choice(seed: int | None, index: int) -> int:
    """The seed of one choice: the request's and the choice's index, modulo the range of int64.

    Choices of a seeded request differ from one another, reproducibly. Those of an unseeded one are random:
    SGLang would take 42 for every request without a seed.
    """
    if seed is None:
        return secrets.randbits(31)
    return (seed + index + SEEDS // 2) % SEEDS - SEEDS // 2


class Renderer:
    """Converts requests for one loaded model, several at a time if its tokenizer can.

    Tokenizers of the `tokenizers` library can, as long as nothing sets padding or truncation meanwhile,
    which media processors do: with those the renderer has a tokenizer of its own.
    """

    def __init__(
        self,
        chat: OpenAIServingChat,
        limits: RenderLimits,
        *,
        name: str,
        remote_media: bool,
        deterministic: bool,
        vision: bool,
    ) -> None:
        if getattr(chat.tokenizer_manager, "mm_processor", None) is not None:
            chat = _with_own_tokenizer(chat)
        self._limits = limits
        self._chat = MeasuredChat(chat, self._check_length)
        several = getattr(chat.tokenizer_manager.tokenizer, "is_fast", False)
        self._converting: AbstractContextManager[Any] = nullcontext() if several else threading.Lock()
        self._deterministic = deterministic
        self._vision = vision
        self._name = name
        self._remote_media = remote_media
        manager = chat.tokenizer_manager
        self._text = TokenizerText(
            manager.tokenizer,
            manager.model_config.vocab_size,
            adds_specials=chat._tokenizer_auto_adds_specials,  # noqa: SLF001
        )
        template = inspect.signature(manager.tokenizer.apply_chat_template)
        self._template_arguments = frozenset(template.parameters)

    def convert(self, request: ChatRequest) -> tuple[Any, ChatCompletionRequest, Splice]:
        """SGLang's internal request, its parsed chat request, and what it has of `past`.

        Raises BadRequest naming the parameter, ContextOverflow.
        """
        if not 1 <= request.n <= MAX_CHOICES:
            raise BadRequest(f"n: must be between 1 and {MAX_CHOICES}.", param="n")
        if not self._vision:
            check_text_only(request)
        # Every template marks where a message begins, in a token at least.
        self._limits.check_least(len(request.body["messages"]))
        body = self._checked_body(request)
        with self._converting:
            return self._convert(body, request)

    def tokenize(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """The ids of a text (`Engine.tokenize`); blocks."""
        with self._converting:
            return self._text.encode(text, add_special_tokens=add_special_tokens)

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        """The text of ids (`Engine.detokenize`); blocks. Raises BadRequest."""
        self._text.check_ids(token_ids)
        with self._converting:
            return self._text.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def tokenizer_json(self) -> str | None:
        """The tokenizer as JSON; None for one that is not of the `tokenizers` library."""
        backend = getattr(self._chat.tokenizer_manager.tokenizer, "backend_tokenizer", None)
        return None if backend is None else backend.to_str()

    def card(self, model_id: str, grammar_backend: str, pool_tokens: int, replicas: int = 1) -> ModelCard:
        """The model's name, limits and capabilities; `pool_tokens` are those of all replicas together."""
        able: dict[Capability, Any] = {
            "logprobs": True,
            "vision": self._vision,
            "tools": self._chat.tool_call_parser,
            "reasoning": self._chat.reasoning_parser,
            "json_schema": grammar_backend != "none",
        }
        return ModelCard(
            id=model_id,
            context_length=self._limits.context_length,
            kv_capacity_tokens=pool_tokens,
            max_prompt_tokens=self._limits.max_prompt_tokens,
            capabilities=frozenset(name for name, has in able.items() if has),
            replicas=replicas,
        )

    def _raw_ids(self, raw: RawPrompt) -> list[int]:
        """The ids of a prompt without a template. Raises ContextOverflow, BadRequest."""
        preface = self._text.encode(raw.preface, add_special_tokens=True) if raw.preface else []
        if raw.token_ids is None:
            self._check_length(raw.text)
            ids = preface + self._text.encode(raw.text, add_special_tokens=not preface)
            if not ids:
                raise BadRequest("prompt has no tokens; send a longer text.", param="prompt")
            return ids
        self._limits.check_least(len(raw.token_ids))
        self._text.check_ids(raw.token_ids, "prompt")
        return [*preface, *raw.token_ids]

    def _check_length(self, prompt: str) -> None:
        """Raise ContextOverflow if the beginning of a text is too long already, before all is tokenized."""
        num_chars = BEGINNING_CHARS * self._limits.max_prompt_tokens
        while num_chars < len(prompt):
            self._limits.check_least(len(self._text.encode(prompt[:num_chars])) - CUT_TOKENS)
            num_chars *= 2

    def _convert(
        self, body: dict[str, Any], request: ChatRequest
    ) -> tuple[Any, ChatCompletionRequest, Splice]:
        if request.raw is not None:  # SGLang then applies no template, and reads no reasoning
            body |= {"input_ids": self._raw_ids(request.raw), "separate_reasoning": False}
        try:
            chat_request = ChatCompletionRequest.model_validate(body)
        except pydantic.ValidationError as exc:
            raise _invalid(exc) from None
        form = chat_request.response_format
        if form is not None and form.type == "structural_tag":
            check_kept(body["response_format"], form.model_dump(by_alias=True), "response_format")
        self._check(chat_request, strict=request.strict)
        prepare_tools(chat_request)
        try:
            internal, chat_request = self._chat._convert_to_internal_request(chat_request)  # noqa: SLF001
            if request.raw is not None:
                internal.require_reasoning = False
                internal.sampling_params["skip_special_tokens"] = body.get("skip_special_tokens", True)
            self._check_sampling(internal.sampling_params, strict=request.strict)
            mend_grammar(internal.sampling_params, chat_request, self._chat)
            spliced = self._splice_past(internal, request.past)
        except PromptTooLong as exc:
            raise exc.overflow from None
        except ServingError:
            raise
        except (ValueError, HTTPException, pydantic.ValidationError) as exc:
            raise refused(exc) from None
        except Exception as exc:
            raise InternalError(f"The request could not be rendered: {type(exc).__name__}.") from exc
        internal.priority, internal.extra_key = (
            request.placement.priority,
            request.placement.cache_salt or None,
        )
        return internal, chat_request, spliced

    def _splice_past(self, internal: Any, past: Sequence[Sequence[int]]) -> Splice:
        """Put past runs in place of the ids rendered for them, where there are any."""
        if internal.contains_mm_input():
            return Splice((), 0, "media" if past else None)
        if internal.input_ids is None:
            # A model that also sees is given text, which SGLang would tokenize like this, on the event loop.
            internal.input_ids = self._chat.tokenizer_manager.tokenizer.encode(internal.text)
            internal.text = None
        spliced = splice(internal.input_ids, past, self._text)
        if spliced.past_runs:
            internal.input_ids = list(spliced.token_ids)
        return spliced

    def _checked_body(self, request: ChatRequest) -> dict[str, Any]:
        # SGLang's validators change the dict that they are given.
        body = {name: _copied(value) for name, value in request.body.items() if value is not None}
        for name in body:
            if SERVER_OWNED.fullmatch(name):
                raise UnsupportedParameter(f"{name}: only this server sets it.", param=name)
            if name not in KNOWN_FIELDS:
                raise UnsupportedParameter(
                    f"{name}: this server does not have that parameter.", code="unknown_parameter", param=name
                )
        requested = request.max_tokens
        body = {name: value for name, value in body.items() if name not in REPLACED}
        if "tools" in body and len(orjson.dumps(body["tools"])) > MAX_TOOLS_BYTES:
            raise BadRequest(f"tools: more than {MAX_TOOLS_BYTES:,} bytes; send fewer.", param="tools")
        if "tools" in body and self._chat.tool_call_parser == BUILTIN_TOOL_PARSER:
            # A model this small does not find the end of a list of calls.
            body.setdefault("parallel_tool_calls", False)
        return body | {"model": self._name, "stream": True, "n": 1, "max_completion_tokens": requested}

    def _check(self, request: ChatCompletionRequest, *, strict: bool) -> None:
        self._check_media(request)
        if problem := self._chat._validate_request(request):  # noqa: SLF001
            words = {"Tool": "tools", "Tools": "tools", "schema_": "response_format"}
            named = _named_in(problem, words)
            raise BadRequest(problem, param=words[named] if named else "messages")
        if request.tools and request.tool_choice != "none" and not self._chat.tool_call_parser:
            raise UnsupportedParameter("tools: this model has no tool-call format.", param="tools")
        thinks = self._chat.reasoning_parser or self._chat.template_manager.reasoning_config
        if strict and request.reasoning_effort not in {None, "none"} and not thinks:
            raise UnsupportedParameter(
                "reasoning_effort: this model does not reason.", param="reasoning_effort"
            )
        for name in request.chat_template_kwargs or {}:
            # It would replace the server's own template, or how it is applied.
            if name in self._template_arguments or name == "messages":
                raise UnsupportedParameter(
                    f"chat_template_kwargs.{name}: only this server sets it.", param="chat_template_kwargs"
                )

    def _check_media(self, request: ChatCompletionRequest) -> None:
        """Allow only media sent with the request: SGLang would also open a URL, or a file of this machine."""
        allowed = ("data:", "http://", "https://") if self._remote_media else ("data:",)
        for number, message in enumerate(request.messages):
            content = getattr(message, "content", None)
            for element in content if isinstance(content, list) else ():
                source = getattr(element, element.type, None) if element.type in MEDIA_PARTS else None
                if source is not None and not source.url.startswith(allowed):
                    raise BadRequest(
                        "Media must be sent as data: URLs; this server fetches none.",
                        param=f"messages[{number}].content",
                    )

    def _check_sampling(self, values: Mapping[str, Any], *, strict: bool) -> None:
        """The checks of `SamplingParams`, which SGLang makes only once it runs."""
        manager = self._chat.tokenizer_manager
        params = manager.sampling_params_class(**values)
        params.normalize(manager.tokenizer)
        params.verify(manager.model_config.vocab_size)
        greedy = params.top_k == 1  # what `normalize` makes of temperature 0
        if strict and params.sampling_seed is not None and not greedy and not self._deterministic:
            raise UnsupportedParameter(
                "seed: needs temperature 0, or a server with `enable_deterministic_inference`.", param="seed"
            )
        if params.min_p > 0 and self._deterministic:
            # SGLang asserts that it is not asked for both, in the scheduler, which would end it.
            raise UnsupportedParameter("min_p: not available in deterministic mode.", param="min_p")
        if any(token_id >= manager.model_config.vocab_size for token_id in params.stop_token_ids or ()):
            # With min_tokens SGLang uses them as indices, in the scheduler, which would end it.
            raise BadRequest("stop_token_ids: not in the model's vocabulary.", param="stop_token_ids")


def _with_own_tokenizer(chat: OpenAIServingChat) -> OpenAIServingChat:
    chat = copy(chat)
    chat.tokenizer_manager = copy(chat.tokenizer_manager)
    chat.tokenizer_manager.tokenizer = deepcopy(chat.tokenizer_manager.tokenizer)
    return chat


def _copied(value: Any) -> Any:
    """A copy of JSON that shares its strings: megabytes of text are not copied."""
    if isinstance(value, dict):
        return {name: _copied(item) for name, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


def _invalid(exc: pydantic.ValidationError) -> BadRequest:
    """The first error, with the parameter spelled as a caller spells it."""
    # A message may be of several types, and pydantic lists the errors of each: take the nearest miss.
    attempts: dict[tuple[Any, ...], list[Any]] = {}
    for error in exc.errors(include_url=False, include_input=False):
        loc = error["loc"]
        types = [number for number, element in enumerate(loc) if not _is_of_caller(element)]
        attempts.setdefault(loc[: types[0] + 1] if types else (), []).append(error)
    error = min(attempts.values(), key=lambda errors: (_misses_role(errors), len(errors)))[0]
    param = ""
    for element in filter(_is_of_caller, error["loc"]):
        param += f"[{element}]" if isinstance(element, int) else f".{element}" if param else element
    message = error["msg"].removeprefix("Value error, ")
    return BadRequest(f"{param}: {message}" if param else message, param=param or None)


def _is_of_caller(element: int | str) -> bool:
    """True if a part of an error's location is the caller's own, not the name of a type that was tried."""
    scalars = {"str", "int", "float", "bool", "none"}
    return isinstance(element, int) or (
        re.fullmatch(r"[a-z_0-9]+", element) is not None and element not in scalars
    )


def _misses_role(errors: list[Any]) -> bool:
    return any(error["loc"][-1] == "role" for error in errors)


def refused(exc: Exception) -> BadRequest:
    """SGLang's refusal as ours, with the parameter if its message names one."""
    if isinstance(exc, HTTPException):
        status = HTTPStatus(exc.status_code).phrase
        return BadRequest(f"The request was refused: {status}: {exc.detail}")
    message = str(exc)[:500]
    named = _named_in(message, KNOWN_FIELDS | PARAM_OF_SAMPLING.keys())
    return BadRequest(message, param=PARAM_OF_SAMPLING.get(named, named) if named else None)


def _named_in(message: str, names: Collection[str]) -> str | None:
    """The first word of a message that is one of `names`."""
    return next((word for word in re.findall(r"\w+", message) if word in names), None)
