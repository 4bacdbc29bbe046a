"""Every parameter of a chat completion request, and what becomes of it.

The table has the parameters of OpenAI and of SGLang 0.5.20, and names of vLLM, llama.cpp and Ollama.
Each is decided once: honoured, translated into its equivalent (app.api.schema.aliases), taken without
effect, or refused with the reason. A name that is not here is refused too: nothing that could change
an answer is dropped in silence. A contract test holds this table against the request model of the
pinned SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, NamedTuple

from app.errors import BadRequest, UnsupportedParameter, unknown_parameter


class Parameter(NamedTuple):
    """A parameter's type, bounds, and whether the engine gets to see it."""

    kinds: tuple[type, ...]
    minimum: float | None = None
    maximum: float | None = None
    to_engine: bool = True
    equivalent: str | None = None
    """The parameter, or the parameters, that app.api.schema.aliases makes of it."""
    refusal: str | None = None
    accepts: tuple[Any, ...] = ()
    """The values that ask for nothing and pass, for a parameter with `refusal`."""
    max_entries: int | None = None
    """Entries of an array or object."""
    max_chars: int | None = None
    """Characters of a string."""


_NAMES: Mapping[type, str] = {
    str: "a string",
    int: "an integer",
    float: "a number",
    bool: "true or false",
    list: "an array",
    dict: "an object",
}


def _number(minimum: float | None = None, maximum: float | None = None) -> Parameter:
    return Parameter((int, float), minimum, maximum)


def _integer(minimum: float | None = None, maximum: float | None = None) -> Parameter:
    return Parameter((int,), minimum, maximum)


def _refused(why: str, *accepts: Any) -> Parameter:
    return Parameter((), refusal=why, accepts=accepts, to_engine=False)


def _no_effect(*kinds: type, max_entries: int | None = None, max_chars: int | None = None) -> Parameter:
    return Parameter(kinds, to_engine=False, max_entries=max_entries, max_chars=max_chars)


def _translated(
    equivalent: str,
    *kinds: type,
    minimum: float | None = None,
    maximum: float | None = None,
    max_entries: int | None = None,
) -> Parameter:
    return Parameter(kinds, minimum, maximum, to_engine=False, equivalent=equivalent, max_entries=max_entries)


_OF_KEY = "is set by an admin for the key, not by a request"
_SERVER_SETS = "is set by the server"
_ONE_PROCESS = "belongs to multi-node SGLang deployments"
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
QUOTED_CHARS = 64
MAX_CHOICES = 1024
"""Texts of `guided_choice`, at most; each is a rule of a grammar."""
_SERVERS_OWN = (
    "stream",
    "stream_options",
    "metadata",
    "moderation",
    "store",
    "conversation_id",
    "parent_id",
    "add_generation_prompt",
)
"""Honoured by the server itself; the engine does not get them."""

PARAMETERS: Mapping[str, Parameter] = {
    "model": Parameter((str,), max_chars=_NAME_CHARS),
    "messages": Parameter((list,), max_entries=MAX_MESSAGES),
    # Length and number of answers
    "max_tokens": _integer(1),
    "max_completion_tokens": _integer(1),
    "min_tokens": _integer(0),
    "n": _integer(1, 128),
    "stop": Parameter((str, list)),
    "stop_token_ids": Parameter((list,)),
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
    "logit_bias": Parameter((dict,), max_entries=MAX_BIASES),
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
    "reasoning_effort": Parameter((str, int, float)),
    "separate_reasoning": Parameter((bool,)),
    "stream_reasoning": Parameter((bool,)),
    "chat_template_kwargs": Parameter((dict,)),
    # The server's own
    "stream": Parameter((bool,), to_engine=False),
    "stream_options": Parameter((dict,), to_engine=False),
    "moderation": Parameter((dict,), to_engine=False),
    "store": Parameter((bool,), to_engine=False),
    "conversation_id": Parameter((str,), to_engine=False, max_chars=_ID_CHARS),
    "parent_id": Parameter((str,), to_engine=False, max_chars=_ID_CHARS),
    "add_generation_prompt": Parameter((bool,), to_engine=False),
    # Names of vLLM, llama.cpp and OpenRouter that have an equivalent
    "guided_json": _translated("response_format", dict, str),
    "guided_regex": _translated("regex", str),
    "guided_choice": _translated("ebnf", list, max_entries=MAX_CHOICES),
    "guided_grammar": _translated("ebnf", str),
    "structured_outputs": _translated("response_format, regex or ebnf", dict),
    "include_stop_str_in_output": _translated("no_stop_trim", bool),
    "json_schema": _translated("response_format", dict),
    "grammar": _translated("ebnf", str),
    "n_predict": _translated("max_tokens", int, minimum=-1),
    "repeat_penalty": _translated("repetition_penalty", int, float, minimum=0.01, maximum=2),
    "reasoning": _translated("reasoning_effort", dict),
    # Taken: they ask for nothing that changes what an answer means
    "user": _no_effect(str, max_chars=_NAME_CHARS),
    "metadata": Parameter((dict,), to_engine=False, max_entries=MAX_METADATA),
    "safety_identifier": _no_effect(str, max_chars=_NAME_CHARS),
    "prompt_cache_key": _no_effect(str, max_chars=_NAME_CHARS),
    "prompt_cache_retention": _no_effect(str, max_chars=_ID_CHARS),
    "service_tier": _no_effect(str, max_chars=_ID_CHARS),
    "verbosity": _no_effect(str, max_chars=_ID_CHARS),
    "prediction": _no_effect(dict),
    "num_ctx": _no_effect(int),
    "keep_alive": _no_effect(str, int, float, max_chars=_ID_CHARS),
    "cache_prompt": _no_effect(bool),
    "id_slot": _no_effect(int),
    "timings_per_token": _no_effect(bool),
    "return_progress": _no_effect(bool),
    "guided_decoding_backend": _no_effect(str, max_chars=_ID_CHARS),
    # Refused
    "modalities": _refused("other than text are not served", ["text"]),
    "audio": _refused(_NO_MEDIA),
    "web_search_options": _refused("web search is not available"),
    "functions": _refused("is deprecated; use tools", []),
    "function_call": _refused("is deprecated; use tool_choice", "none", "auto"),
    "priority": _refused(_OF_KEY, 0),
    "rid": _refused(_SERVER_SETS),
    "cache_salt": _refused(_SERVER_SETS),
    "extra_key": _refused(_SERVER_SETS),
    "lora_path": _refused("adapters are chosen by the operator"),
    "session_id": _refused("use conversations instead of engine sessions"),
    "session_params": _refused("use conversations instead of engine sessions"),
    "custom_logit_processor": _refused("would run the caller's code in the engine"),
    "stop_regex": _refused("a backtracking pattern would stall all generations; use stop"),
    "custom_params": _refused("belongs to custom_logit_processor"),
    "input_ids": _refused("send messages; the server renders them"),
    "task": _refused("belongs to models that this server does not serve"),
    "return_hidden_states": _refused(_NOT_RETURNED, False),
    "return_routed_experts": _refused(_NOT_RETURNED, False),
    "routed_experts_start_len": _refused(_NOT_RETURNED, 0),
    "return_cached_tokens_details": _refused(_NOT_RETURNED, False),
    "return_spec_tokens_details": _refused(_NOT_RETURNED, False),
    "return_prompt_token_ids": _refused(_NOT_RETURNED, False),
    "return_token_ids": _refused(_NOT_RETURNED, False),
    "return_meta_info": _refused(_NOT_RETURNED, False),
    "return_input_ids_in_sglext": _refused(_NOT_RETURNED, False),
    "return_output_ids_in_sglext": _refused(_NOT_RETURNED, False),
    "return_sampling_mask": _refused(_NOT_RETURNED, False),
    "max_dynamic_patch": _refused("image tiling is the model's"),
    "min_dynamic_patch": _refused("image tiling is the model's"),
    "images_config": _refused("image processing is the operator's"),
    "use_audio_in_video": _refused(_NO_MEDIA, False),
    "video_config": _refused(_NO_MEDIA),
    "bootstrap_host": _refused(_ONE_PROCESS),
    "bootstrap_port": _refused(_ONE_PROCESS),
    "bootstrap_room": _refused(_ONE_PROCESS),
    "routed_dp_rank": _refused(_ONE_PROCESS),
    "disagg_prefill_dp_rank": _refused(_ONE_PROCESS),
    "data_parallel_rank": _refused(_ONE_PROCESS),
    # Names of other servers without an equivalent
    "guided_whitespace_pattern": _refused("white space of JSON is chosen by the server"),
    "structural_tag": _refused("is sent as response_format of type structural_tag"),
    "best_of": _refused("candidates are not ranked here; use n", 1),
    "use_beam_search": _refused(_BEAMS, False),
    "length_penalty": _refused(_BEAMS, 1),
    "early_stopping": _refused(_BEAMS, False),
    "echo": _refused("the prompt is not repeated in an answer", False),
    "prompt_logprobs": _refused(_NOT_RETURNED),
    "return_tokens_as_token_ids": _refused(_NOT_RETURNED, False),
    "return_tokens": _refused(_NOT_RETURNED, False),
    "post_sampling_probs": _refused("probabilities are taken before sampling; use logprobs", False),
    "n_probs": _refused("use logprobs and top_logprobs", 0),
    "truncate_prompt_tokens": _refused("a prompt is never shortened; send fewer messages"),
    "allowed_token_ids": _refused("use logit_bias, regex or ebnf"),
    "bad_words": _refused("use logit_bias with their token ids", []),
    "logits_processors": _refused("would run the caller's code in the engine"),
    "spaces_between_special_tokens": _refused("is the model's", True),
    "add_special_tokens": _refused("the chat template writes them", False),
    "chat_template": _refused("is the operator's"),
    "documents": _refused("is not read; write them into the messages", []),
    "mm_processor_kwargs": _refused("image processing is the operator's"),
    "request_id": _refused("is set by the server; read x-request-id of the answer"),
    "include_reasoning": _refused("reasoning cannot be left out; use separate_reasoning", True),
    "enable_thinking": _refused("use chat_template_kwargs.enable_thinking"),
    "thinking": _refused("use chat_template_kwargs.thinking"),
    "think": _refused("use chat_template_kwargs.enable_thinking"),
    "reasoning_format": _refused("use separate_reasoning", "auto", "deepseek"),
    "format": _refused("use response_format"),
    "options": _refused("send its entries as parameters of their own", {}),
    "extra_body": _refused("send its entries as parameters of their own", {}),
    "num_predict": _refused("use max_tokens"),
    "typical_p": _refused(_SAMPLER, 1),
    "mirostat": _refused(_SAMPLER, 0),
    "dynatemp_range": _refused(_SAMPLER, 0),
    "xtc_probability": _refused(_SAMPLER, 0),
    "dry_multiplier": _refused(_SAMPLER, 0),
    "top_n_sigma": _refused(_SAMPLER, -1),
    "samplers": _refused(_SAMPLER, []),
    "lora": _refused("adapters are chosen by the operator", []),
}


def check(name: str, value: Any, *, strict: bool = False) -> Parameter:
    """The table's entry for a parameter of this value.

    `strict` refuses a parameter without effect, too. Raises BadRequest for a wrong type or range,
    UnsupportedParameter for a name that is not in the table or refused.
    """
    parameter = PARAMETERS.get(name)
    if parameter is None:
        raise unknown_parameter(name, quoted(name))
    if parameter.refusal is not None:
        if not any(_is_same(value, neutral) for neutral in parameter.accepts):
            advice = "" if "use " in parameter.refusal or ";" in parameter.refusal else "; remove it"
            raise UnsupportedParameter(f"{name}: {parameter.refusal}{advice}.", param=name)
        return parameter
    check_kind(name, value, *parameter.kinds)
    _check_size(name, value, parameter)
    if parameter.minimum is not None and not value >= parameter.minimum:  # NaN is neither
        raise BadRequest(f"{name} must be at least {plain(parameter.minimum)}, got {value}.", param=name)
    if parameter.maximum is not None and not value <= parameter.maximum:
        raise BadRequest(f"{name} must be at most {plain(parameter.maximum)}, got {value}.", param=name)
    if strict and treatment(name) == "ignored":
        raise UnsupportedParameter(
            f"{name}: has no effect on this server, which refuses such parameters (strict_parameters);"
            " remove it.",
            param=name,
        )
    return parameter


def _is_same(value: Any, neutral: Any) -> bool:
    """True if two JSON values are equal; a truth value is no number."""
    return isinstance(value, bool) == isinstance(neutral, bool) and bool(value == neutral)


def _check_size(name: str, value: Any, parameter: Parameter) -> None:
    """Raise BadRequest for too many entries or characters."""
    if isinstance(value, str):
        check_chars(name, value, parameter.max_chars)
    elif isinstance(value, list | dict):
        limit = parameter.max_entries
        if limit is not None and len(value) > limit:
            raise BadRequest(f"{name} takes at most {limit:,} entries, got {len(value):,}.", param=name)


def check_chars(where: str, text: str, limit: int | None) -> None:
    """Raise BadRequest, naming `where`, for a text of more than `limit` characters; None is no limit."""
    if limit is not None and len(text) > limit:
        raise BadRequest(f"{where} takes at most {limit:,} characters, got {len(text):,}.", param=where)


def quoted(text: str) -> str:
    """A caller's text as an error quotes it: the beginning, however long it is."""
    return repr(text if len(text) <= QUOTED_CHARS else text[:QUOTED_CHARS] + "…")


def treatment(name: str) -> Literal["honoured", "translated", "ignored", "refused"]:
    """The treatment of a parameter of the table."""
    parameter = PARAMETERS[name]
    if parameter.refusal is not None:
        return "refused"
    if parameter.equivalent is not None:
        return "translated"
    return "honoured" if parameter.to_engine or name in _SERVERS_OWN else "ignored"


def plain(number: float) -> str:
    """A bound as people write it; 64-bit ones as powers."""
    named = {2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}
    return named.get(int(number)) or f"{number:,}"


def kind_names(kinds: Iterable[type]) -> list[str]:
    """The kinds as a caller knows them; an integer is a number."""
    return list(dict.fromkeys(_NAMES[k] for k in kinds if k is not int or float not in kinds))


def check_kind(param: str, value: Any, *kinds: type) -> None:
    """Raise BadRequest, naming `param`, unless the JSON value is of one of `kinds`."""
    # bool is an int in Python, not in JSON.
    if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
        expected = " or ".join(kind_names(kinds))
        got = "null" if value is None else _NAMES.get(type(value), type(value).__name__)
        raise BadRequest(f"{param} must be {expected}, got {got}.", code="invalid_type", param=param)
