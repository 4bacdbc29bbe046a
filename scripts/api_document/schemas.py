"""JSON schemas of what the API takes, from the tables that the handlers check requests by."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from app.api.routes.sign_in import FIELDS as SIGN_IN_FIELDS
from app.api.schema import completions, imported, key_terms, moderations, tokens
from app.api.schema.aliases import FORMS
from app.api.schema.fields import Field
from app.api.schema.formats import FORMATS
from app.api.schema.messages import MESSAGES, PARTS, ROLES
from app.api.schema.parameters import PARAMETERS, TOKEN_ID, Parameter
from app.api.schema.template_switches import SWITCHES
from app.api.schema.tools import CHOICES
from app.api.schema.tools import TOOL as TOOL_FIELD
from app.core import DEGRADING, GRAMMARS, RESUMING, SAFETY_LEVELS, SCOPES, TIERS
from app.errors import CODES
from app.safety.moderation import MODELS as MODERATION_MODELS
from app.store.conversations import MAX_BRANCH_MESSAGES

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
_USD = r"^[0-9]{1,9}(\.[0-9]{1,6})?$"
_TIME = "A UTC day or time, as 2026-11-20 or 2026-11-20T18:00Z, or Unix seconds"


def of_field(field: Field, *, nullable: bool = False) -> Schema:
    """The schema of what a field declares."""
    if field.dropped:
        return {"description": "Taken and dropped."}
    # A number that may be a fraction is `number` alone.
    kinds = [kind for kind in field.kinds if kind is not int or float not in field.kinds]
    null: list[Any] = [None] if nullable else []
    types = [_JSON_TYPES[kind] for kind in kinds] + (["null"] if nullable else [])
    schema: Schema = {"type": types if len(types) > 1 else types[0]}
    bounds = {name: value for name, value in _bounds(field) if value not in (None, 0, math.inf)}
    if field.minimum == 0:
        bounds = {"minimum": 0, **bounds}
    if field.choices:
        words: Schema = {"enum": [*field.choices, *null]}
        return schema | {"anyOf": [words, {"type": "number", **bounds}]} if len(kinds) > 1 else words
    schema |= bounds
    if field.items is not None:
        schema["items" if list in kinds else "additionalProperties"] = of_field(field.items)
    if field.fields is not None:
        schema |= of_fields(field.fields, field.required) | {"type": schema["type"]}
    return schema


def _bounds(field: Field) -> Iterator[tuple[str, Any]]:
    yield from (("minimum", field.minimum), ("maximum", field.maximum))
    yield from (("minLength", field.min_chars), ("maxLength", field.max_chars))
    noun = "Items" if list in field.kinds else "Properties"
    yield from ((f"min{noun}", field.min_entries), (f"max{noun}", field.max_entries))


def of_fields(fields: Mapping[str, Field], required: Iterable[str] = ()) -> Schema:
    """The schema of an object with these fields: null is absent, and an unknown name is a 400."""
    names = list(required)
    return strict_object({n: of_field(f, nullable=n not in names) for n, f in fields.items()}, names)


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
    treated = parameter.treatment
    if parameter.refusal is not None:
        values = [*parameter.accepts, None]
        return {
            "enum": values,
            "description": f"Refused: {parameter.refusal}.",
            "x-tokenring-treatment": treated,
        }
    schema = of_field(parameter, nullable=name not in NEVER_NULL) | {"x-tokenring-treatment": treated}
    if parameter.equivalent is not None:
        schema["description"] = f"Translated into {parameter.equivalent}."
    return schema | _CONTENTS.get(name, {})


def _message_fields() -> Iterator[tuple[str, Field]]:
    for field in MESSAGES.values():
        yield from (field.fields or {}).items()


CONTENT_PART: Schema = {"anyOf": [of_field(field) for field in PARTS.values()]}
TOOL = of_field(TOOL_FIELD)
MESSAGE = of_fields(dict(_message_fields()), ["role"])
MESSAGE["properties"] |= {
    "role": {"enum": list(ROLES)},
    "content": {
        "type": ["string", "array", "null"],
        "items": {"$ref": "#/components/schemas/ContentPart"},
        "description": "Required, but of an assistant message with `tool_calls`.",
    },
}
MESSAGE["properties"]["reasoning_content"]["description"] = "Read with this request, not stored."


_CONTENTS: Mapping[str, Schema] = {
    "model": {"description": "May be left out, or `default`, where the server has one model."},
    "messages": {
        "items": {"$ref": "#/components/schemas/Message"},
        "description": "At least one message, unless `conversation_id` names what to answer.",
    },
    "logit_bias": {"propertyNames": {"pattern": "^[0-9]{1,9}$"}},
    "chat_template_kwargs": {
        "properties": {name: of_field(switch) for name, switch in SWITCHES.items()},
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
        "properties": {"type": {"enum": list(FORMATS)}},
        "required": ["type"],
        "description": "Without effect where `tool_choice` wants a call.",
    },
    "tools": {"items": {"$ref": "#/components/schemas/Tool"}},
    "tool_choice": {
        "anyOf": [{"enum": [*CHOICES, None]}, {"type": "object"}],
        "description": "A choice other than none and auto needs `tools`.",
    },
    "add_generation_prompt": {"description": "The opposite of `continue_final_message`."},
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
        "weight": of_field(key_terms.WEIGHT),
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
    schema = of_fields(key_terms.ROTATION)
    schema["properties"]["overlap_s"]["default"] = key_terms.DEFAULT_OVERLAP_S
    return schema


def sign_in() -> Schema:
    """The body that exchanges an issuer's code for a key."""
    return of_fields(SIGN_IN_FIELDS, SIGN_IN_FIELDS)


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
    ids: Schema = {"type": "array", "minItems": 1, "items": of_field(TOKEN_ID)}
    prompts: Schema = {"type": "array", "minItems": 1, "maxItems": completions.MAX_CHOICES}
    own = {name: _parameter(name, parameter) for name, parameter in completions.OWN.items()}
    own["prompt"] = {"anyOf": [text, ids, {**prompts, "items": {"anyOf": [text, ids]}}]}
    own["best_of"]["description"] = "The same as `n`."
    shared = {name: _parameter(name, PARAMETERS[name]) for name in completions.SHARED}
    shared["max_tokens"] |= {"default": completions.DEFAULT_MAX_TOKENS}
    return strict_object({**own, **shared}, ["prompt"])


def tokenize_request() -> Schema:
    """The body of a tokenize request: a prompt, or messages."""
    schema = of_fields(tokens.TOKENIZE)
    schema["properties"] |= {
        name: _parameter(name, PARAMETERS[name]) for name in ("messages", *tokens.TEMPLATE)
    }
    schema["properties"] |= {name: {"enum": [passes, None]} for name, passes in tokens.ASKS_NOTHING.items()}
    for theirs, ours in tokens.LLAMA_CPP.items():
        schema["properties"][theirs]["description"] = f"llama.cpp's name of `{ours}`."
    return schema


def detokenize_request() -> Schema:
    """The body of a detokenize request."""
    schema = of_fields(tokens.DETOKENIZE, ["tokens"])
    ids: Schema = {"type": "array", "items": of_field(TOKEN_ID)}
    lists: Schema = {"type": "array", "minItems": 1, "maxItems": tokens.MAX_TEXTS, "items": ids}
    schema["properties"]["tokens"] = {"anyOf": [ids, lists]}
    return schema


def new_title() -> Schema:
    """The body that renames a conversation."""
    return strict_object({"title": of_field(imported.TITLE) | {"pattern": r"\S"}}, ["title"])


def imported_conversation() -> Schema:
    """The body that imports a conversation: an export of this server, or less."""
    own = of_fields(imported.MESSAGE)["properties"]
    own["parent_id"]["description"] = "The `id` of an earlier message; null at the top. Else the one before."
    schema = of_fields(imported.IMPORT, ["messages"])
    schema["properties"]["messages"] |= {
        "minItems": 1,
        "maxItems": MAX_BRANCH_MESSAGES,
        "items": {**MESSAGE, "properties": {**MESSAGE["properties"], **own}},
    }
    return schema


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
