"""Every parameter of a chat completion request, and what becomes of it.

OpenAI's and SGLang 0.5.20's parameters, each decided once: honoured by the engine, read by
the server, accepted because it asks for nothing, or refused with the reason. A name that is
not here is refused too: nothing is dropped in silence. A contract test holds this table
against the request model of the pinned SGLang.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import orjson

from app.api.schema import template_switches
from app.errors import BadRequest, UnknownModel, UnsupportedParameter
from app.safety.moderation import MODELS as MODERATION_MODELS


class Parameter(NamedTuple):
    """A parameter's type, bounds, and whether the engine gets to see it."""

    kinds: tuple[type, ...]
    minimum: float | None = None
    maximum: float | None = None
    to_engine: bool = True
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


_OF_KEY = "is set by an admin for the key, not by a request"
_SERVER_SETS = "is set by the server"
_ONE_PROCESS = "belongs to multi-node SGLang deployments"
_NOT_RETURNED = "asks for engine internals, which this server does not return"
_NO_MEDIA = "audio and video are not served"
MAX_STOPS = 16
MAX_STOP_CHARS = 1000
MAX_MESSAGES = 2048
"""Messages of a request, at most, as with Azure OpenAI: a conversation of a thousand turns."""
MAX_REQUEST_PARTS = 4096
"""Content parts of all messages together."""
MAX_TOOLS = 128
"""Tools of a request, at most; OpenAI's limit."""
MAX_BIASES = 1024
"""Entries of `logit_bias`, at most; OpenAI's limit."""
MAX_METADATA, MAX_METADATA_NAME_CHARS, MAX_METADATA_CHARS = 16, 64, 512
"""Pairs, and characters of each one's name and value, as OpenAI has them."""
_ID_CHARS = 128
_NAME_CHARS = 512
"""OpenAI allows 64 for `safety_identifier`; agents send longer ones as `user`."""
_QUOTED_CHARS = 64
_SERVERS_OWN = ("stream", "stream_options", "moderation", "store", "conversation_id", "parent_id")
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
    # Accepted: they ask for nothing that changes the answer
    "user": _no_effect(str, max_chars=_NAME_CHARS),
    "metadata": _no_effect(dict, max_entries=MAX_METADATA),
    "safety_identifier": _no_effect(str, max_chars=_NAME_CHARS),
    "prompt_cache_key": _no_effect(str, max_chars=_NAME_CHARS),
    "service_tier": _refused(_OF_KEY, "auto", "default"),
    "modalities": _refused("other than text are not served", ["text"]),
    # Refused
    "audio": _refused(_NO_MEDIA),
    "prediction": _refused("predicted outputs are not supported by the engine"),
    "web_search_options": _refused("there is no web search here"),
    "functions": _refused("is deprecated; use tools"),
    "function_call": _refused("is deprecated; use tool_choice"),
    "verbosity": _refused("is not supported by the engine; say it in the messages"),
    "prompt_cache_retention": _refused("cannot be chosen; the prefix cache keeps what fits"),
    "priority": _refused(_OF_KEY),
    "rid": _refused(_SERVER_SETS),
    "cache_salt": _refused(_SERVER_SETS),
    "extra_key": _refused(_SERVER_SETS),
    "lora_path": _refused("adapters are chosen by the operator"),
    "session_id": _refused("use conversations instead of engine sessions"),
    "session_params": _refused("use conversations instead of engine sessions"),
    "custom_logit_processor": _refused("would run the caller's code in the engine"),
    "stop_regex": _refused("a pattern that backtracks would stall everyone's generation; use stop"),
    "custom_params": _refused("belongs to custom_logit_processor"),
    "input_ids": _refused("send messages; the server renders them"),
    "task": _refused("belongs to models that this server does not serve"),
    "return_hidden_states": _refused(_NOT_RETURNED),
    "return_routed_experts": _refused(_NOT_RETURNED),
    "routed_experts_start_len": _refused(_NOT_RETURNED),
    "return_cached_tokens_details": _refused(_NOT_RETURNED),
    "return_spec_tokens_details": _refused(_NOT_RETURNED),
    "return_prompt_token_ids": _refused(_NOT_RETURNED),
    "return_token_ids": _refused(_NOT_RETURNED),
    "return_meta_info": _refused(_NOT_RETURNED),
    "return_input_ids_in_sglext": _refused(_NOT_RETURNED),
    "return_output_ids_in_sglext": _refused(_NOT_RETURNED),
    "return_sampling_mask": _refused(_NOT_RETURNED),
    "max_dynamic_patch": _refused("image tiling is the model's"),
    "min_dynamic_patch": _refused("image tiling is the model's"),
    "images_config": _refused("image processing is the operator's"),
    "use_audio_in_video": _refused(_NO_MEDIA),
    "video_config": _refused(_NO_MEDIA),
    "bootstrap_host": _refused(_ONE_PROCESS),
    "bootstrap_port": _refused(_ONE_PROCESS),
    "bootstrap_room": _refused(_ONE_PROCESS),
    "routed_dp_rank": _refused(_ONE_PROCESS),
    "disagg_prefill_dp_rank": _refused(_ONE_PROCESS),
    "data_parallel_rank": _refused(_ONE_PROCESS),
}


def check(name: str, value: Any) -> Parameter:
    """The table's entry for a parameter of this value.

    Raises BadRequest for a wrong type or range, UnsupportedParameter for a name that is
    unknown or refused.
    """
    parameter = PARAMETERS.get(name)
    if parameter is None:
        raise UnsupportedParameter(
            f"Unknown parameter {quoted(name)}; remove it.", code="unknown_parameter", param=name
        )
    if parameter.refusal is not None:
        # By type too: 0 == False.
        if not any(type(value) is type(v) and value == v for v in parameter.accepts):
            raise UnsupportedParameter(f"{name}: {parameter.refusal}; remove it.", param=name)
        return parameter
    check_kind(name, value, *parameter.kinds)
    _check_size(name, value, parameter)
    if parameter.minimum is not None and value < parameter.minimum:
        raise BadRequest(f"{name} must be at least {_plain(parameter.minimum)}, got {value}.", param=name)
    if parameter.maximum is not None and value > parameter.maximum:
        raise BadRequest(f"{name} must be at most {_plain(parameter.maximum)}, got {value}.", param=name)
    return parameter


def _check_size(name: str, value: Any, parameter: Parameter) -> None:
    """Raise BadRequest for too many entries or characters."""
    if isinstance(value, str):
        _check_chars(name, value, parameter.max_chars)
    elif isinstance(value, list | dict):
        limit = parameter.max_entries
        if limit is not None and len(value) > limit:
            raise BadRequest(f"{name} takes at most {limit:,} entries, got {len(value):,}.", param=name)


def _check_chars(where: str, text: str, limit: int | None) -> None:
    if limit is not None and len(text) > limit:
        raise BadRequest(f"{where} takes at most {limit:,} characters, got {len(text):,}.", param=where)


def quoted(text: str) -> str:
    """A caller's text as an error quotes it: the beginning, however long it is."""
    return repr(text if len(text) <= _QUOTED_CHARS else text[:_QUOTED_CHARS] + "…")


def check_values(body: Mapping[str, Any]) -> None:
    """Check what the parameters that are lists and maps hold. Raises BadRequest naming the place."""
    stop = body.get("stop")
    single = [] if stop is None else [("stop", stop)]
    for where, text in _items("stop", stop, MAX_STOPS) if isinstance(stop, list) else single:
        check_kind(where, text, str)
        if not 0 < len(text) <= MAX_STOP_CHARS:
            raise BadRequest(f"{where} must have 1 to {MAX_STOP_CHARS} characters.", param=where)
    for where, token_id in _items("stop_token_ids", body.get("stop_token_ids", ()), MAX_STOPS):
        check_kind(where, token_id, int)
        if not 0 <= token_id < 2**31:
            raise BadRequest(f"{where} is no token id: {token_id}.", param=where)
    for token_id, bias in body.get("logit_bias", {}).items():
        where = f"logit_bias.{token_id[:_QUOTED_CHARS]}"
        if not (token_id.isascii() and token_id.isdigit() and len(token_id) < 10):
            raise BadRequest(f"{where}: keys are token ids.", param="logit_bias")
        check_kind(where, bias, int, float)
        if not -100 <= bias <= 100:
            raise BadRequest(f"{where} must be -100 to 100, got {bias}.", param=where)
    for name, value in body.get("metadata", {}).items():
        where = f"metadata.{name[:MAX_METADATA_NAME_CHARS]}"
        if len(name) > MAX_METADATA_NAME_CHARS:
            raise BadRequest(
                f"{where}…: names take at most {MAX_METADATA_NAME_CHARS} characters, got {len(name):,}.",
                param="metadata",
            )
        check_kind(where, value, str)
        _check_chars(where, value, MAX_METADATA_CHARS)
    _check_parts(body["messages"])


def _check_parts(messages: Sequence[Mapping[str, Any]]) -> None:
    """Raise BadRequest for too many content parts; the messages were checked."""
    contents = (message.get("content") for message in messages)
    parts = sum(len(content) for content in contents if isinstance(content, list))
    if parts > MAX_REQUEST_PARTS:
        raise BadRequest(
            f"messages take at most {MAX_REQUEST_PARTS:,} content parts together, got {parts:,}.",
            param="messages",
        )


def check_moderation(asked: Mapping[str, Any]) -> None:
    """Check the `moderation` parameter, which has a model and nothing else.

    Raises BadRequest and UnknownModel naming the place.
    """
    for name in asked.keys() - {"model"}:
        where = f"moderation.{name[:_QUOTED_CHARS]}"
        raise UnsupportedParameter(
            f"Unknown parameter {where!r}; remove it.", code="unknown_parameter", param=where
        )
    if asked.get("model") is None:
        where = "moderation.model"
        raise BadRequest(f"{where} is required.", code="missing_parameter", param=where)
    check_moderation_model(asked["model"], "moderation.model")


def check_moderation_model(name: Any, where: str) -> None:
    """Raise BadRequest or UnknownModel, naming `where`, unless `name` is a moderation model."""
    check_kind(where, name, str)
    if name not in MODERATION_MODELS:
        raise UnknownModel(
            f"There is no moderation model {quoted(name)} here; ask for 'omni-moderation-latest'.",
            param=where,
        )


def _items(name: str, values: Sequence[Any], max_length: int) -> Iterator[tuple[str, Any]]:
    if len(values) > max_length:
        raise BadRequest(f"{name} takes at most {max_length} entries, got {len(values)}.", param=name)
    for i, value in enumerate(values):
        yield f"{name}[{i}]", value


def treatment(name: str) -> Literal["honoured", "ignored", "refused"]:
    """The treatment of a parameter of the table."""
    parameter = PARAMETERS[name]
    if parameter.refusal is not None:
        return "refused"
    return "honoured" if parameter.to_engine or name in _SERVERS_OWN else "ignored"


def markdown() -> str:
    """The tables of docs/parameters.md. Parameters that are refused for one reason share a row."""
    honoured = ["| parameter | type | range |", "|---|---|---|"]
    unheeded = ["| parameter | type | range |", "|---|---|---|"]
    refused: dict[tuple[str, str], list[str]] = {}
    for name, p in PARAMETERS.items():
        kinds = " or ".join(_kind_names(p.kinds))
        treated = treatment(name)
        if p.refusal is not None:
            passes = ", ".join(f"`{orjson.dumps(v).decode()}`" for v in p.accepts)
            refused.setdefault((p.refusal, passes), []).append(f"`{name}`")
        elif treated == "honoured":
            honoured.append(f"| `{name}` | {kinds} | {_RANGES.get(name) or _range(p)} |")
        else:
            unheeded.append(f"| `{name}` | {kinds} | {_RANGES.get(name) or _range(p)} |")
    rows = [f"| {', '.join(names)} | {why} | {passes} |" for (why, passes), names in refused.items()]
    parts = [
        ("Honoured", honoured),
        ("Accepted, and without effect on the answer", unheeded),
        ("Refused", ["| parameter | why | values that pass |", "|---|---|---|", *rows]),
    ]
    tables = ["\n".join([f"## {title}", "", *table, ""]) for title, table in parts]
    return "\n".join([*tables, template_switches.markdown()])


_RANGES: Mapping[str, str] = {
    "stop": f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS:,} characters",
    "stop_token_ids": f"at most {MAX_STOPS} token ids",
    "logit_bias": f"at most {MAX_BIASES:,} token ids, each with a number from -100 to 100",
    "metadata": f"at most {MAX_METADATA} entries; names of at most {MAX_METADATA_NAME_CHARS} characters,"
    f" strings of at most {MAX_METADATA_CHARS}",
    "seed": "-2^63 to 2^63 - 1; needs `temperature` 0, or a server with `enable_deterministic_inference`",
    "top_logprobs": "0 to 20; needs `logprobs`",
    "stream_options": "`include_usage` and `continuous_usage_stats`; needs `stream`",
    "moderation": '`{"model": "omni-moderation-latest"}`',
}
"""What the tables show beyond `Parameter`; `check_values` and app.api.schema.wire enforce it."""


def _range(parameter: Parameter) -> str:
    if parameter.max_entries is not None:
        return f"at most {parameter.max_entries:,} entries"
    if parameter.max_chars is not None:
        return f"at most {parameter.max_chars:,} characters"
    low, high = parameter.minimum, parameter.maximum
    if high is not None:
        return f"{_plain(low or 0)} to {_plain(high)}"
    return "" if low is None else f"at least {_plain(low)}"


def _plain(number: float) -> str:
    """A bound as people write it; 64-bit ones as powers."""
    named = {2**63 - 1: "2^63 - 1", -(2**63): "-2^63"}
    return named.get(int(number)) or f"{number:,}"


def _kind_names(kinds: Iterable[type]) -> list[str]:
    """The kinds as a caller knows them; an integer is a number."""
    return list(dict.fromkeys(_NAMES[k] for k in kinds if k is not int or float not in kinds))


def check_kind(param: str, value: Any, *kinds: type) -> None:
    """Raise BadRequest, naming `param`, unless the JSON value is of one of `kinds`."""
    # bool is an int in Python, not in JSON.
    if (isinstance(value, bool) and bool not in kinds) or not isinstance(value, kinds):
        expected = " or ".join(_kind_names(kinds))
        got = "null" if value is None else _NAMES.get(type(value), type(value).__name__)
        raise BadRequest(f"{param} must be {expected}, got {got}.", code="invalid_type", param=param)
