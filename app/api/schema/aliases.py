"""Parameters that other servers have, in the words of this server: vLLM's, llama.cpp's and OpenRouter's.

They are translated ahead of every other check, so that they meet the limits, screens and rights of
their equivalents. An error names the parameter that the caller has sent.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from app.api.schema.fields import ANY, BOOL, TEXT, Field, check_kind, read, read_fields
from app.api.schema.formats import schema_format
from app.api.schema.parameters import PARAMETERS
from app.errors import BadRequest
from app.intake.json_body import parse_body

Parameters = dict[str, Any]
MAX_TEXT_BYTES = 256 * 1024
"""A JSON text within a JSON string, at most: it is parsed on the event loop, in 5 ms."""
Translated = tuple[str, Any] | None
"""A parameter and its value; None where nothing is asked for."""


def translated(values: Mapping[str, Any]) -> tuple[Parameters, dict[str, str]]:
    """The parameters under this server's names, and the caller's name of each that was translated.

    Raises BadRequest and UnsupportedParameter naming the caller's parameter.
    """
    result = {name: value for name, value in values.items() if name not in _TRANSLATIONS}
    caller_names: dict[str, str] = {}
    for name in [name for name in values if name in _TRANSLATIONS]:
        translation = _TRANSLATIONS[name](values[name], name)
        if translation is None:
            continue
        equivalent, value = translation
        if equivalent in result:
            other = caller_names.get(equivalent, equivalent)
            raise BadRequest(f"{name} and {other} mean the same; send only {other}.", param=name)
        result[equivalent] = value
        caller_names[equivalent] = name
    return result, caller_names


def _schema(value: Any, where: str) -> Translated:
    """A JSON schema, as an object or as its text."""
    if isinstance(value, str):
        value = _parsed(value, where, "a JSON schema")
    check_kind(where, value, dict)
    return "response_format", schema_format(value)


def _parsed(text: str, where: str, noun: str) -> dict[str, Any]:
    """The object in a JSON text, which is bounded as a body is. Raises BadRequest."""
    raw = text.encode()
    if len(raw) > MAX_TEXT_BYTES:
        raise BadRequest(f"{where} has over {MAX_TEXT_BYTES:,} bytes as a text; send an object.", param=where)
    try:
        return parse_body(raw)
    except BadRequest as error:
        message, code = error.message.replace("The body", where, 1), error.code
        if code == "invalid_json":
            message = f"{where} must be {noun}. {message}"
            code = "invalid_type" if text.lstrip().startswith("[") else "invalid_value"
        raise BadRequest(message, code=code, param=where) from None


def _choice(value: Any, where: str) -> Translated:
    """The grammar of an answer that is one of some texts."""
    texts = read(value, where, PARAMETERS["guided_choice"])
    return "ebnf", "root ::= " + " | ".join(json.dumps(text, ensure_ascii=False) for text in texts)


def _json_object(value: Any, where: str) -> Translated:
    return ("response_format", {"type": "json_object"}) if read(value, where, BOOL) else None


def _structural_tag(value: Any, where: str) -> Translated:
    check_kind(where, value, str, dict)
    tag = _parsed(value, where, "a structural tag as JSON") if isinstance(value, str) else value
    return "response_format", {**tag, "type": "structural_tag"}


def _outputs(value: Any, where: str) -> Translated:
    """vLLM's `structured_outputs`: an object with one form of grammar."""
    sent = read_fields(value, where, _FORM_FIELDS)
    for name in sent.keys() - FORMS.keys():
        if sent.pop(name):
            raise BadRequest(f"{where}.{name}: the server decides that; remove it.", param=f"{where}.{name}")
    if len(sent) != 1:
        raise BadRequest(f"{where} must have one of {', '.join(FORMS)}, got {len(sent)}.", param=where)
    [(form, content)] = sent.items()
    return FORMS[form](content, f"{where}.{form}")


def _tokens(value: Any, where: str) -> Translated:
    """llama.cpp's number of tokens, of which -1 is no limit."""
    del where
    return None if value == -1 else ("max_tokens", value)


def _effort(value: Any, where: str) -> Translated:
    """OpenRouter's `reasoning`."""
    sent = read_fields(value, where, {"effort": ANY})
    return ("reasoning_effort", sent["effort"]) if sent else None


def _renamed(equivalent: str, field: Field = ANY) -> Callable[[Any, str], Translated]:
    return lambda value, where: (equivalent, read(value, where, field))


_regex, _grammar = _renamed("regex", TEXT), _renamed("ebnf", TEXT)
FORMS: Mapping[str, Callable[[Any, str], Translated]] = {
    "json": _schema,
    "regex": _regex,
    "choice": _choice,
    "grammar": _grammar,
    "json_object": _json_object,
    "structural_tag": _structural_tag,
}
_FORM_FIELDS: Mapping[str, Field] = {
    **dict.fromkeys(FORMS, ANY),
    **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties", "disable_fallback"), BOOL),
}
_TRANSLATIONS: Mapping[str, Callable[[Any, str], Translated]] = {
    "guided_json": _schema,
    "guided_regex": _regex,
    "guided_choice": _choice,
    "guided_grammar": _grammar,
    "structured_outputs": _outputs,
    "include_stop_str_in_output": _renamed("no_stop_trim"),
    "json_schema": _schema,
    "grammar": _grammar,
    "n_predict": _tokens,
    "repeat_penalty": _renamed("repetition_penalty"),
    "reasoning": _effort,
}
