"""JSON schemas of what the API takes, from the tables that the handlers check requests by."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from app.api.schema import completions, key_terms, moderations, tokens
from app.api.schema.aliases import FORMS
from app.api.schema.conversations import MAX_TITLE
from app.api.schema.formats import KINDS
from app.api.schema.messages import ACCEPTED, ACCEPTED_OF_ASSISTANT, ROLES
from app.api.schema.parameters import (
    MAX_CHOICES,
    MAX_STOP_CHARS,
    MAX_STOPS,
    PARAMETERS,
    Parameter,
    treatment,
)
from app.api.schema.template_switches import EFFORTS, SWITCHES, Switch
from app.api.schema.tools import CHOICES
from app.core import DEGRADING, GRAMMARS, MAX_WEIGHT, MIN_WEIGHT, RESUMING, SAFETY_LEVELS, SCOPES, TIERS
from app.errors import CODES
from app.messages import MAX_ID_CHARS, MAX_NAME_CHARS
from app.safety.moderation import MODELS as MODERATION_MODELS

Schema = dict[str, Any]

NEVER_NULL = ("model", "messages")
"""The parameters of a chat request that are not null; any other may be, which means absent."""
_JSON_TYPES: Mapping[type, str] = {
    str: "string",
    int: "integer",
    float: "number",
    bool: "boolean",
    list: "array",
    dict: "object",
}
_TOKEN_ID: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
_NULLABLE_TEXT: Schema = {"type": ["string", "null"]}
_MAX_TOKEN_ID = 2**31 - 1
_USD = r"^[0-9]{1,9}(\.[0-9]{1,6})?$"
_TIME = "A UTC day or time, as 2026-11-20 or 2026-11-20T18:00Z, or Unix seconds"


def strict_object(properties: Mapping[str, Schema], required: Iterable[str] = ()) -> Schema:
    """An object with these properties and no other: an unknown name is a 400."""
    return {
        "type": "object",
        "properties": dict(properties),
        "required": list(required),
        "additionalProperties": False,
    }


def chat_request() -> Schema:
    """The body of a chat completion request: every entry of PARAMETERS."""
    return strict_object({name: _parameter(name, p) for name, p in PARAMETERS.items()}, ["messages"])


def _parameter(name: str, parameter: Parameter) -> Schema:
    treated = treatment(name)
    if parameter.refusal is not None:
        values = [*parameter.accepts, None]
        return {
            "enum": values,
            "description": f"Refused: {parameter.refusal}.",
            "x-tokenring-treatment": treated,
        }
    schema: Schema = {"type": _types(name, parameter), "x-tokenring-treatment": treated}
    if parameter.equivalent is not None:
        schema["description"] = f"Translated into {parameter.equivalent}."
    if parameter.minimum is not None:
        schema["minimum"] = parameter.minimum
    if parameter.maximum is not None:
        schema["maximum"] = parameter.maximum
    if parameter.max_chars is not None:
        schema["maxLength"] = parameter.max_chars
    if parameter.max_entries is not None:
        schema["maxItems" if list in parameter.kinds else "maxProperties"] = parameter.max_entries
    return schema | _CONTENTS.get(name, {})


def _types(name: str, parameter: Parameter) -> list[str]:
    """The JSON types that pass; a number that may be a fraction is `number` alone."""
    kinds = [k for k in parameter.kinds if k is not int or float not in parameter.kinds]
    return [_JSON_TYPES[k] for k in kinds] + ([] if name in NEVER_NULL else ["null"])


_STOP_TEXT: Schema = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
CONTENT_PART: Schema = {
    "type": "object",
    "properties": {
        "type": {"type": "string"},
        "text": {"type": "string"},
        "image_url": {
            "type": "object",
            "properties": {"url": {"type": "string"}},
            "required": ["url"],
        },
    },
    "required": ["type"],
}
_ACCEPTED_MEMBERS = {
    name: {"description": "Taken and dropped."} for name in sorted(ACCEPTED | ACCEPTED_OF_ASSISTANT)
}
TOOL: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["function", None]},
        "function": {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": MAX_NAME_CHARS},
                "description": {"type": ["string", "null"]},
                "parameters": {"type": ["object", "null"], "description": "A JSON schema."},
                "strict": {"type": ["boolean", "null"]},
            },
            "required": ["name"],
        },
    },
    "required": ["function"],
}
MESSAGE: Schema = {
    "type": "object",
    "properties": {
        **_ACCEPTED_MEMBERS,
        "role": {"enum": list(ROLES)},
        "name": {"type": ["string", "null"], "maxLength": MAX_NAME_CHARS},
        "reasoning_content": {
            "type": ["string", "null"],
            "description": "Read with this request, not stored.",
        },
        "reasoning": {"type": ["string", "null"], "description": "The same under another name."},
        "content": {
            "type": ["string", "array", "null"],
            "items": {"$ref": "#/components/schemas/ContentPart"},
            "description": "Required, but of an assistant message with `tool_calls`.",
        },
        "tool_calls": {"type": ["array", "null"], "items": {"type": "object"}},
        "tool_call_id": {"type": ["string", "null"], "maxLength": MAX_ID_CHARS},
    },
    "required": ["role"],
    "additionalProperties": False,
}


def _switch(switch: Switch) -> Schema:
    """A switch of a chat template."""
    if switch.minimum is None:
        return {"enum": list(switch.words)} if switch.words else {"type": "boolean"}
    kind = "integer" if switch.whole else "number"
    number: Schema = {"type": kind, "minimum": switch.minimum, "maximum": switch.maximum}
    return {"anyOf": [{"enum": list(switch.words)}, number]} if switch.words else number


_CONTENTS: Mapping[str, Schema] = {
    "model": {"description": "May be left out, or `default`, where the server has one model."},
    "messages": {
        "items": {"$ref": "#/components/schemas/Message"},
        "description": "At least one message, unless `conversation_id` names what to answer.",
    },
    "stop": {"minLength": 1, "maxLength": MAX_STOP_CHARS, "maxItems": MAX_STOPS, "items": _STOP_TEXT},
    "stop_token_ids": {
        "maxItems": MAX_STOPS,
        "items": {"type": "integer", "minimum": 0, "maximum": _MAX_TOKEN_ID},
    },
    "logit_bias": {
        "propertyNames": {"pattern": "^[0-9]{1,9}$"},
        "additionalProperties": {"type": "number", "minimum": -100, "maximum": 100},
    },
    "reasoning_effort": {
        "anyOf": [{"enum": [*EFFORTS, None]}, {"type": "number", "minimum": 0, "maximum": 1}],
    },
    "chat_template_kwargs": {
        "properties": {name: _switch(switch) for name, switch in SWITCHES.items()},
        "additionalProperties": False,
    },
    "stream_options": {
        "properties": {
            "include_usage": {"type": "boolean"},
            "continuous_usage_stats": {"type": "boolean"},
            "include_obfuscation": {"const": False},
        },
        "additionalProperties": False,
        "description": "Needs `stream: true`.",
    },
    "moderation": {
        "properties": {"model": {"enum": sorted(MODERATION_MODELS)}},
        "required": ["model"],
        "additionalProperties": False,
    },
    "response_format": {
        "properties": {"type": {"enum": list(KINDS)}},
        "required": ["type"],
        "description": "Without effect where `tool_choice` wants a call.",
    },
    "tools": {"items": {"$ref": "#/components/schemas/Tool"}},
    "tool_choice": {
        "anyOf": [{"enum": [*CHOICES, None]}, {"type": "object"}],
        "description": "A choice other than none and auto needs `tools`.",
    },
    "add_generation_prompt": {"description": "The opposite of `continue_final_message`."},
    "guided_choice": {
        "minItems": 1,
        "maxItems": MAX_CHOICES,
        "items": {"type": "string", "minLength": 1},
        "description": "Translated into ebnf.",
    },
    "structured_outputs": {
        "minProperties": 1,
        "properties": {form: {} for form in FORMS},
        "description": "One form. Translated into response_format, regex or ebnf.",
    },
    "top_logprobs": {"description": "Needs `logprobs: true`."},
    "parent_id": {"description": "Needs a `conversation_id`."},
}


def _printable(max_chars: int) -> Schema:
    return {"type": "string", "minLength": 1, "maxLength": max_chars, "description": "Printable characters."}


def _count() -> Schema:
    return {"type": ["integer", "null"], "minimum": 1, "maximum": key_terms.MAX_COUNT}


def _terms() -> Mapping[str, Schema]:
    """The terms of a key (app.api.schema.key_terms.TERMS), each as it may be sent."""
    return {
        "name": _printable(key_terms.MAX_CHARS),
        "scope": {"enum": list(SCOPES)},
        "tier": {"enum": list(TIERS)},
        "weight": {"type": "number", "minimum": MIN_WEIGHT, "maximum": MAX_WEIGHT},
        "rpm": _count(),
        "tpm": _count(),
        "max_streams": _count(),
        "budget_usd": {
            "type": ["number", "string", "null"],
            "exclusiveMinimum": 0,
            "maximum": key_terms.MAX_USD,
            "pattern": _USD,
            "description": "USD with at most 6 decimals.",
        },
        "models": {
            "type": ["array", "null"],
            "minItems": 1,
            "maxItems": key_terms.MAX_MODELS,
            "items": _printable(2 * key_terms.MAX_CHARS),
        },
        "expires_at": {"type": ["string", "integer", "null"], "description": f"{_TIME}; not in the past."},
        "safety": {"enum": list(SAFETY_LEVELS)},
        "degrade": {"enum": list(DEGRADING)},
        "grammars": {"enum": list(GRAMMARS)},
        "resume": {"enum": list(RESUMING)},
    }


def new_key() -> Schema:
    """The body that makes a key."""
    return strict_object({**_terms(), "owner": _printable(key_terms.MAX_CHARS)}, ["name"])


def changed_key() -> Schema:
    """The body that changes a key."""
    return strict_object(_terms())


def rotation() -> Schema:
    """The body that gives a key a new secret."""
    overlap_s: Schema = {"type": "number", "minimum": 0, "maximum": key_terms.MAX_OVERLAP_S}
    return strict_object({"overlap_s": {**overlap_s, "default": key_terms.DEFAULT_OVERLAP_S}})


def moderation_request() -> Schema:
    """The body of a moderation request."""
    text: Schema = {"type": "string", "maxLength": moderations.MAX_CHARS}
    text_part = strict_object({"type": {"const": "text"}, "text": text}, ["type", "text"])
    texts: Schema = {"type": "array", "minItems": 1, "maxItems": moderations.MAX_INPUTS, "items": text}
    model: Schema = {"enum": [*sorted(MODERATION_MODELS), None]}
    parts: Schema = {"type": "array", "minItems": 1, "maxItems": moderations.MAX_INPUTS, "items": text_part}
    return strict_object({"input": {"anyOf": [text, texts, parts]}, "model": model}, ["input"])


def completion_request() -> Schema:
    """The body of a text completion request."""
    text: Schema = {"type": "string", "minLength": 1}
    ids: Schema = {"type": "array", "minItems": 1, "items": _TOKEN_ID}
    prompts: Schema = {"type": "array", "minItems": 1, "maxItems": completions.MAX_CHOICES}
    own: Mapping[str, Schema] = {
        "prompt": {"anyOf": [text, ids, {**prompts, "items": {"anyOf": [text, ids]}}]},
        "logprobs": {"type": ["integer", "null"], "minimum": 0, "maximum": completions.MAX_LOGPROBS},
        "best_of": {
            "type": ["integer", "null"],
            "minimum": 1,
            "maximum": completions.MAX_CHOICES,
            "description": "The same as `n`.",
        },
    }
    refused: Mapping[str, Schema] = {
        name: {"enum": [passes, None], "description": f"Refused: {why}."}
        for name, (why, passes) in completions.REFUSED.items()
    }
    shared = {name: _parameter(name, PARAMETERS[name]) for name in completions.SHARED}
    shared["max_tokens"] |= {"default": completions.DEFAULT_MAX_TOKENS}
    return strict_object({**own, **refused, **shared}, ["prompt"])


def tokenize_request() -> Schema:
    """The body of a tokenize request: a prompt, or messages."""
    text: Schema = {"type": "string"}
    texts: Schema = {"type": "array", "minItems": 1, "maxItems": tokens.MAX_TEXTS, "items": text}
    chat = {name: _parameter(name, PARAMETERS[name]) for name in ("messages", *tokens.TEMPLATE)}
    return strict_object(
        {
            "model": _NULLABLE_TEXT,
            "prompt": {"anyOf": [text, texts, {"type": "null"}]},
            "add_special_tokens": {"type": ["boolean", "null"]},
            "content": {"type": ["string", "null"], "description": "llama.cpp's name of `prompt`."},
            "add_special": {"type": ["boolean", "null"], "description": "Of `add_special_tokens`."},
            **{name: {"enum": [passes, None]} for name, passes in tokens.ASKS_NOTHING.items()},
            **chat,
        }
    )


def detokenize_request() -> Schema:
    """The body of a detokenize request."""
    ids: Schema = {"type": "array", "items": _TOKEN_ID}
    lists: Schema = {"type": "array", "minItems": 1, "maxItems": tokens.MAX_TEXTS, "items": ids}
    return strict_object(
        {
            "model": _NULLABLE_TEXT,
            "tokens": {"anyOf": [ids, lists]},
            "skip_special_tokens": {"type": ["boolean", "null"]},
        },
        ["tokens"],
    )


def new_title() -> Schema:
    """The body that renames a conversation."""
    return strict_object(
        {"title": {"type": "string", "pattern": r"\S", "minLength": 1, "maxLength": MAX_TITLE}}, ["title"]
    )


def error(status: int) -> Schema:
    """The body of every error of a status, with the codes that it can have."""
    codes = sorted(name for name, code in CODES.items() if code.status == status)
    return {
        "type": "object",
        "properties": {
            "error": {
                "type": "object",
                "properties": {
                    "message": {"type": "string"},
                    "type": {"type": "string"},
                    "param": {"type": ["string", "null"]},
                    "code": {"enum": codes},
                },
                "required": ["message", "type", "param", "code"],
            },
            "moderation": {"type": "object", "description": "Beside `content_filter`: OpenAI's object."},
        },
        "required": ["error"],
    }
