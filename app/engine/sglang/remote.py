"""Rendering and parsing for a model that another SGLang server runs, by the same code as our own engine's.

SGLang's chat conversion asks its tokenizer manager for a tokenizer, a model configuration and two
parser names; `_Standin` has them, loaded from the model's files or from a copy of the small ones.
A server could render too (`/v1/tokenize`), but then nothing could be refused by name, no grammar
checked, no past turn taken over as the ids it was, before a request has left.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from app.core import ChatRequest, Prompt
from app.engine.continuation import TextRules
from app.engine.grammar.cost import GrammarBudget
from app.engine.http.model import Facts
from app.engine.sglang.allowed_args import is_speculative
from app.engine.sglang.platform import prepare_process, without_collections
from app.engine.sink import ChoiceSink, GenerationStream
from app.errors import EngineFailed

# Of SGLang's internal request, what `/generate` takes and this server lets through.
SENT = (
    "sampling_params",
    "return_logprob",
    "logprob_start_len",
    "top_logprobs_num",
    "require_reasoning",
    "priority",
    "extra_key",
    "cache_salt",
    "routing_key",
)
EAGLE = frozenset({"EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "FROZEN_KV_MTP"})


@dataclass(frozen=True, slots=True)
class RemoteModelOptions:
    """`tokenizer` is a path or hub id of the model's small files; empty takes the server's own path."""

    served_model_name: str = ""
    tokenizer: str = ""
    default_max_tokens: int = sys.maxsize
    grammars: GrammarBudget = GrammarBudget()  # noqa: RUF009  # a tuple, immutable


class _Standin:
    """A stand-in for the tokenizer manager, with all that SGLang's chat conversion asks of it."""

    def __init__(self, facts: Facts, path: str) -> None:
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.sampling.sampling_params import SamplingParams
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        server = facts.server
        trusted = False  # a model's own code is run by the server that serves it, not here
        self.server_args = self.processor = None
        self.sampling_params_class = SamplingParams
        self.model_path = str(facts.model["model_path"])
        self.served_model_name = str(facts.model["served_model_name"])
        self.model_config = ModelConfig(
            path,
            trust_remote_code=trusted,
            context_length=server.get("context_length"),
            model_override_args=server.get("json_model_override_args") or "{}",
            sampling_defaults=server.get("sampling_defaults") or "model",
        )
        self.tokenizer = get_tokenizer(
            path, tokenizer_mode=server.get("tokenizer_mode") or "auto", trust_remote_code=trusted
        )
        self._parsers = {name: facts.model.get(name) for name in ("tool_call_parser", "reasoning_parser")}

    def config_value(self, name: str) -> Any:
        return self._parsers[name]


class SGLangRemoteModel:
    """A `RemoteModel` that renders and parses with SGLang's code."""

    def __init__(self, facts: Facts, options: RemoteModelOptions) -> None:
        from app.engine.sglang.grammar import grammar_check
        from app.engine.sglang.render import Renderer, RenderLimits

        path = options.tokenizer or str(facts.model.get("tokenizer_path") or facts.model["model_path"])
        standin = _load(facts, path)
        self._chat = _chat(standin, facts)
        server = facts.server
        self._deterministic = bool(server.get("enable_deterministic_inference"))
        grammar = server.get("grammar_backend") or "none"
        self._grammar = grammar_check(
            standin,
            grammar,
            any_whitespace=not server.get("constrained_json_disable_any_whitespace"),
            speculative=is_speculative(server),
            budget=options.grammars,
        )
        context = int(standin.model_config.context_len)
        capacity = int(server["max_total_num_tokens"])
        self._limits = RenderLimits(
            context_length=context,
            kv_capacity_tokens=capacity,
            max_prompt_tokens=int(server.get("max_req_input_len") or min(context, capacity) - 5) - 1,
            page_size=int(server.get("page_size") or 1),
            reserved_tokens=_reserved_tokens(server),
            default_max_tokens=options.default_max_tokens,
        )
        self._renderer = Renderer(
            self._chat,
            self._limits,
            name=standin.served_model_name,
            remote_media=False,
            deterministic=self._deterministic,
            vision=False,  # only the server's image processor knows how many tokens an image is
        )
        self.tokenize, self.detokenize = self._renderer.tokenize, self._renderer.detokenize
        self.tokenizer_json = self._renderer.tokenizer_json
        self.start, self.aclose = self._grammar.start, self._grammar.aclose
        pool_tokens = capacity * int(server.get("dp_size") or 1)
        model_id = options.served_model_name or standin.served_model_name
        self.card = self._renderer.card(model_id, grammar, pool_tokens)

    def render(self, request: ChatRequest) -> Prompt:
        """Template, tokenize and check a request. Raises BadRequest naming the parameter, ContextOverflow."""
        from app.engine.sglang.render import Rendered, refused

        internal, chat_request, spliced = self._renderer.convert(request)
        token_ids = internal.input_ids
        try:
            internal.normalize_batch_and_arguments()
        except ValueError as exc:
            raise refused(exc) from None
        sampling = internal.sampling_params
        sampling["max_new_tokens"] = self._limits.max_tokens(len(token_ids), sampling.get("max_new_tokens"))
        body = {name: value for name in SENT if (value := getattr(internal, name)) is not None}
        body["input_ids"] = list(token_ids)
        return Prompt(
            token_ids,
            sampling["max_new_tokens"],
            Rendered(body, chat_request, request.n, chat_request.seed),
            past_runs=spliced.past_runs,
            rerendered=spliced.rerendered,
            space=request.placement.cache_salt,
        )

    async def check_grammar(self, owner: str, prompt: Prompt) -> None:
        rendered = prompt.handle
        await self._grammar.check(owner, rendered.sent["sampling_params"], rendered.request)

    def choices(self, prompt: Prompt) -> int:
        count: int = prompt.handle.choices
        return count

    def body(self, prompt: Prompt, index: int) -> dict[str, Any]:
        """The body of `/generate` for one choice; a seeded request's choices differ, reproducibly."""
        body = dict(prompt.handle.sent)
        if self._deterministic:
            from app.engine.sglang.render import seed_of_choice

            seed = seed_of_choice(prompt.handle.seed, index)
            body["sampling_params"] = body["sampling_params"] | {"sampling_seed": seed}
        return body

    def rules(self, prompt: Prompt) -> TextRules:
        from app.engine.sglang.tokenizer import text_rules

        body = prompt.handle.sent
        return text_rules(self._chat, body["sampling_params"], reasons=bool(body.get("require_reasoning")))

    def sink(self, prompt: Prompt, index: int, out: GenerationStream) -> ChoiceSink:
        from app.engine.sglang.parse import choice_sink

        sink: ChoiceSink = choice_sink(
            index, out, len(prompt.token_ids), self._chat, request=prompt.handle.request
        )
        return sink


def load_remote_model(facts: Facts, options: RemoteModelOptions) -> SGLangRemoteModel:
    """The model that `facts` describe. Imports SGLang, which takes seconds. Raises EngineFailed."""
    with warnings.catch_warnings(), without_collections():
        warnings.simplefilter("ignore")  # imports warn of hardware that this machine does not have
        prepare_process()
        try:
            return SGLangRemoteModel(facts, options)
        except (KeyError, TypeError, ValueError) as exc:
            raise EngineFailed(
                f"the server reports too little of its model: {type(exc).__name__}: {exc}"
            ) from exc


def _load(facts: Facts, path: str) -> _Standin:
    from app.engine.sglang.patches.builtin_tools import load_sglang

    load_sglang()
    _publish(path)
    try:
        return _Standin(facts, path)
    except Exception as exc:
        raise EngineFailed(
            f"the tokenizer of {facts.model['served_model_name']!r} could not be loaded from {path!r}"
            f" ({type(exc).__name__}); set `remote_tokenizer` to a copy of the model's configuration and"
            " tokenizer files"
        ) from exc


def _publish(path: str) -> None:
    """SGLang reads one configuration of the process; an engine in this one has published its own."""
    from sglang.srt import runtime_context
    from sglang.srt.server_args import ServerArgs

    from app.engine.sglang.args import SGLangOptions, server_arguments

    if runtime_context.publish_role() is None:
        runtime_context.publish(ServerArgs(**server_arguments(SGLangOptions(model=path))), role="tokenizer")


def _chat(standin: _Standin, facts: Facts) -> Any:
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.parser.template_manager import TemplateManager

    templates = TemplateManager()
    named = facts.server.get("chat_template")
    if named and ("/" in named or "." in named) and not Path(named).exists():
        raise EngineFailed(f"the server's chat template {named!r} is a file that is not on this machine")
    templates.initialize_templates(standin, standin.model_path, chat_template=named)
    chat = OpenAIServingChat(standin, templates)
    chat.default_chat_template_kwargs = facts.server.get("default_chat_template_kwargs") or {}
    return chat


def _reserved_tokens(server: Mapping[str, Any]) -> int:
    """Tokens of each request's context that speculation takes (SGLang's `compute_num_reserved_tokens`)."""
    if str(server.get("speculative_algorithm") or "").upper() not in EAGLE:
        return 0
    topk, steps = server.get("speculative_eagle_topk") or 1, server.get("speculative_num_steps") or 1
    return int(max(topk * steps, server.get("speculative_num_draft_tokens") or 1))
