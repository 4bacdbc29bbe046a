"""Every parameter of a chat completion request, and what becomes of it.

The table has the parameters of OpenAI and of SGLang 0.5.20, and names of vLLM, llama.cpp and Ollama.
Each is decided once: honoured, translated into its equivalent (app.api.schema.aliases), taken without
effect, or refused with the reason. A name that is not here is refused too: nothing that could change
an answer is dropped in silence. A contract test holds this table against the request model of the
pinned SGLang.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from app.api.schema.fields import TEXT, Field, quoted, read
from app.api.schema.template_switches import EFFORT
from app.errors import UnsupportedParameter, unknown_parameter


@dataclass(frozen=True, slots=True)
class Parameter(Field):
    """A field of the body, and what becomes of it."""

    to_engine: bool = True
    ignored: bool = False
    """Taken without effect."""
    equivalent: str | None = None
    """The parameter, or the parameters, that app.api.schema.aliases makes of it."""
    refusal: str | None = None
    accepts: tuple[Any, ...] = ()
    """The values that ask for nothing and pass, for a parameter with `refusal`."""

    @property
    def treatment(self) -> Literal["honoured", "translated", "ignored", "refused"]:
        """What becomes of it."""
        if self.refusal is not None:
            return "refused"
        if self.equivalent is not None:
            return "translated"
        return "ignored" if self.ignored else "honoured"


def _number(minimum: float, maximum: float) -> Parameter:
    return Parameter((int, float), minimum, maximum)


def _integer(minimum: float, maximum: float | None = None) -> Parameter:
    return Parameter((int,), minimum, maximum)


def _own(*kinds: type, **bounds: Any) -> Parameter:
    """A parameter that the server honours itself; the engine does not get it."""
    return Parameter(kinds, **bounds, to_engine=False)


def _ignored(*kinds: type, max_chars: float = math.inf) -> Parameter:
    return Parameter(kinds, max_chars=max_chars, to_engine=False, ignored=True)


def _translated(equivalent: str, *kinds: type, **bounds: Any) -> Parameter:
    return Parameter(kinds, **bounds, to_engine=False, equivalent=equivalent)


def refused(names: str, why: str, *accepts: Any) -> dict[str, Parameter]:
    """Parameters of these names, refused with the reason unless they have one of the values `accepts`."""
    return dict.fromkeys(names.split(), Parameter((), refusal=why, accepts=accepts, to_engine=False))


_MULTI_NODE = "belongs to multi-node SGLang deployments"
_SAMPLER = "is a sampler that SGLang does not have; use temperature, top_p, top_k or min_p"
_BEAMS = "belongs to beam search, which SGLang does not have"
_NOT_RETURNED = "asks for engine internals, which this server does not return"
_NO_MEDIA = "audio and video are not served"
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_ALL_STOP_CHARS = 65_536
"""Characters of all stop strings, times the choices: a new character takes a bit of each."""
MAX_MESSAGES = 2048
"""Messages of a request, at most, as with Azure OpenAI: a conversation of a thousand turns."""
MAX_REQUEST_PARTS = 4096
"""Content parts of all messages together."""
MAX_REQUEST_CALLS = 4096
"""Tool calls of all messages together: each takes some 10 us to check and 10 us to read."""
MAX_TOOLS = 128
"""Tools of a request, at most; OpenAI's limit."""
MAX_BIASES = 1024
"""Entries of `logit_bias`, at most; OpenAI's limit."""
MAX_ALL_BIASES = 16_384
"""Those entries, times the choices: 4 ms of the step that all requests share, when the choices begin."""
MAX_METADATA, MAX_METADATA_NAME_CHARS, MAX_METADATA_CHARS = 16, 64, 512
"""Pairs, and characters of each one's name and value, as OpenAI has them."""
_ID_CHARS = 128
_NAME_CHARS = 512
"""OpenAI allows 64 for `safety_identifier`; agents send longer ones as `user`."""
MAX_CHOICES = 1024
"""Texts of `guided_choice`, at most; each is a rule of a grammar."""
_STOP: Mapping[str, Any] = {"min_chars": 1, "max_chars": MAX_STOP_CHARS}
_WORD = Field((str,), min_chars=1)
TOKEN_ID = Field((int,), 0, 2**31 - 1)

PARAMETERS: Mapping[str, Parameter] = {
    "model": Parameter((str,), max_chars=_NAME_CHARS),
    "messages": Parameter((list,), max_entries=MAX_MESSAGES),
    # Length and number of answers
    "max_tokens": _integer(1),
    "max_completion_tokens": _integer(1),
    "min_tokens": _integer(0),
    "n": _integer(1, 128),
    "stop": Parameter((str, list), **_STOP, max_entries=MAX_STOPS, items=Field((str,), **_STOP)),
    "stop_token_ids": Parameter((list,), max_entries=MAX_STOPS, items=TOKEN_ID),
    "no_stop_trim": Parameter((bool,)),
    "ignore_eos": Parameter((bool,)),
    "skip_special_tokens": Parameter((bool,)),
    "continue_final_message": Parameter((bool,)),
    # Sampling
    "temperature": _number(0, 2),
    "top_p": _number(0, 1),
    "top_k": _integer(-1, 1_000_000),
    "min_p": _number(0, 1),
    "frequency_penalty": _number(-2, 2),
    "presence_penalty": _number(-2, 2),
    # Logits are divided by it: near 0 they overflow, and SGLang's scheduler ends with them.
    "repetition_penalty": _number(0.01, 2),
    "logit_bias": Parameter((dict,), max_entries=MAX_BIASES, items=Field((int, float), -100, 100)),
    "seed": _integer(-(2**63), 2**63 - 1),
    "logprobs": Parameter((bool,)),
    "top_logprobs": _integer(0, 20),
    # Format, tools, reasoning
    "response_format": Parameter((dict,)),
    "regex": Parameter((str,)),
    "ebnf": Parameter((str,)),
    "tools": Parameter((list,), max_entries=MAX_TOOLS),
    "tool_choice": Parameter((str, dict)),
    "parallel_tool_calls": Parameter((bool,)),
    "reasoning_effort": Parameter(EFFORT.kinds, EFFORT.minimum, EFFORT.maximum, choices=EFFORT.choices),
    "separate_reasoning": Parameter((bool,)),
    "stream_reasoning": Parameter((bool,)),
    "chat_template_kwargs": Parameter((dict,)),
    # The server's own
    "stream": _own(bool),
    "stream_options": _own(dict),
    "moderation": _own(dict, fields={"model": TEXT}, required=("model",)),
    "metadata": _own(dict, max_entries=MAX_METADATA, items=Field((str,), max_chars=MAX_METADATA_CHARS)),
    "store": _own(bool),
    "conversation_id": _own(str, max_chars=_ID_CHARS),
    "parent_id": _own(str, max_chars=_ID_CHARS),
    "add_generation_prompt": _own(bool),
    # Names of vLLM, llama.cpp and OpenRouter that have an equivalent
    "guided_json": _translated("response_format", dict, str),
    "guided_regex": _translated("regex", str),
    "guided_choice": _translated("ebnf", list, min_entries=1, max_entries=MAX_CHOICES, items=_WORD),
    "guided_grammar": _translated("ebnf", str),
    "structured_outputs": _translated("response_format, regex or ebnf", dict),
    "include_stop_str_in_output": _translated("no_stop_trim", bool),
    "json_schema": _translated("response_format", dict),
    "grammar": _translated("ebnf", str),
    "n_predict": _translated("max_tokens", int, minimum=-1),
    "repeat_penalty": _translated("repetition_penalty", int, float, minimum=0.01, maximum=2),
    "reasoning": _translated("reasoning_effort", dict),
    # Taken: they ask for nothing that changes what an answer means
    "user": _ignored(str, max_chars=_NAME_CHARS),
    "safety_identifier": _ignored(str, max_chars=_NAME_CHARS),
    "prompt_cache_key": _ignored(str, max_chars=_NAME_CHARS),
    "prompt_cache_retention": _ignored(str, max_chars=_ID_CHARS),
    "service_tier": _ignored(str, max_chars=_ID_CHARS),
    "verbosity": _ignored(str, max_chars=_ID_CHARS),
    "prediction": _ignored(dict),
    "num_ctx": _ignored(int),
    "keep_alive": _ignored(str, int, float, max_chars=_ID_CHARS),
    "cache_prompt": _ignored(bool),
    "id_slot": _ignored(int),
    "timings_per_token": _ignored(bool),
    "return_progress": _ignored(bool),
    "guided_decoding_backend": _ignored(str, max_chars=_ID_CHARS),
    # Refused
    **refused("modalities", "other than text are not served", ["text"]),
    **refused("audio video_config", _NO_MEDIA),
    **refused("use_audio_in_video", _NO_MEDIA, False),
    **refused("web_search_options", "web search is not available"),
    **refused("functions", "is deprecated; use tools", []),
    **refused("function_call", "is deprecated; use tool_choice", "none", "auto"),
    **refused("priority", "is set by an admin for the key, not by a request", 0),
    **refused("rid cache_salt extra_key", "is set by the server"),
    **refused("lora_path", "adapters are chosen by the operator"),
    **refused("lora", "adapters are chosen by the operator", []),
    **refused("session_id session_params", "use conversations instead of engine sessions"),
    **refused("custom_logit_processor logits_processors", "would run the caller's code in the engine"),
    **refused("stop_regex", "a backtracking pattern would stall all generations; use stop"),
    **refused("custom_params", "belongs to custom_logit_processor"),
    **refused("input_ids", "send messages; the server renders them"),
    **refused("task", "belongs to models that this server does not serve"),
    **refused("prompt_logprobs", _NOT_RETURNED),
    **refused("routed_experts_start_len", _NOT_RETURNED, 0),
    **refused(
        "return_hidden_states return_routed_experts return_cached_tokens_details", _NOT_RETURNED, False
    ),
    **refused("return_spec_tokens_details return_prompt_token_ids return_token_ids", _NOT_RETURNED, False),
    **refused(
        "return_meta_info return_input_ids_in_sglext return_output_ids_in_sglext", _NOT_RETURNED, False
    ),
    **refused("return_sampling_mask return_tokens_as_token_ids return_tokens", _NOT_RETURNED, False),
    **refused("max_dynamic_patch min_dynamic_patch", "image tiling is the model's"),
    **refused("images_config mm_processor_kwargs", "image processing is the operator's"),
    **refused("bootstrap_host bootstrap_port bootstrap_room", _MULTI_NODE),
    **refused("routed_dp_rank disagg_prefill_dp_rank data_parallel_rank", _MULTI_NODE),
    # Names of other servers without an equivalent
    **refused("guided_whitespace_pattern", "white space of JSON is chosen by the server"),
    **refused("structural_tag", "is sent as response_format of type structural_tag"),
    **refused("best_of", "candidates are not ranked here; use n", 1),
    **refused("use_beam_search early_stopping", _BEAMS, False),
    **refused("length_penalty", _BEAMS, 1),
    **refused("echo", "the prompt is not repeated in an answer", False),
    **refused("post_sampling_probs", "probabilities are taken before sampling; use logprobs", False),
    **refused("n_probs", "use logprobs and top_logprobs", 0),
    **refused("truncate_prompt_tokens", "a prompt is never shortened; send fewer messages"),
    **refused("allowed_token_ids", "use logit_bias, regex or ebnf"),
    **refused("bad_words", "use logit_bias with their token ids", []),
    **refused("spaces_between_special_tokens", "is the model's", True),
    **refused("add_special_tokens", "the chat template writes them", False),
    **refused("chat_template", "is the operator's"),
    **refused("documents", "is not read; write them into the messages", []),
    **refused("request_id", "is set by the server; read x-request-id of the answer"),
    **refused("include_reasoning", "reasoning cannot be left out; use separate_reasoning", True),
    **refused("enable_thinking think", "use chat_template_kwargs.enable_thinking"),
    **refused("thinking", "use chat_template_kwargs.thinking"),
    **refused("reasoning_format", "use separate_reasoning", "auto", "deepseek"),
    **refused("format", "use response_format"),
    **refused("options extra_body", "send its entries as parameters of their own", {}),
    **refused("num_predict", "use max_tokens"),
    **refused("typical_p", _SAMPLER, 1),
    **refused("mirostat dynatemp_range xtc_probability dry_multiplier", _SAMPLER, 0),
    **refused("top_n_sigma", _SAMPLER, -1),
    **refused("samplers", _SAMPLER, []),
}


def check(name: str, value: Any, *, strict: bool = False, table: Mapping[str, Parameter] = PARAMETERS) -> Any:
    """The value of a parameter as its entry in the table declares it; one that is refused may be neutral.

    `strict` refuses a parameter without effect, too. Raises BadRequest for a wrong type or range,
    UnsupportedParameter for a name that is not in the table or refused.
    """
    parameter = table.get(name)
    if parameter is None:
        raise unknown_parameter(name, quoted(name))
    if parameter.refusal is not None:
        if not any(_is_same(value, neutral) for neutral in parameter.accepts):
            advice = "" if "use " in parameter.refusal or ";" in parameter.refusal else "; remove it"
            raise UnsupportedParameter(f"{name}: {parameter.refusal}{advice}.", param=name)
        return value
    value = read(value, name, parameter)
    if strict and parameter.ignored:
        raise UnsupportedParameter(
            f"{name}: has no effect on this server, which refuses such parameters (strict_parameters);"
            " remove it.",
            param=name,
        )
    return value


def _is_same(value: Any, neutral: Any) -> bool:
    """True if two JSON values are equal; a truth value is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)
