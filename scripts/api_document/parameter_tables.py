"""The tables of docs/parameters.md, from the table that requests are checked by."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping

import orjson

from app.api.schema.fields import Field, kind_names, plain
from app.api.schema.parameters import (
    MAX_ALL_BIASES,
    MAX_ALL_STOP_CHARS,
    MAX_BIASES,
    MAX_METADATA,
    MAX_METADATA_CHARS,
    MAX_METADATA_NAME_CHARS,
    MAX_STOP_CHARS,
    MAX_STOPS,
    PARAMETERS,
    Parameter,
)
from app.api.schema.template_switches import SWITCHES


def markdown() -> str:
    """The tables of docs/parameters.md. Parameters that are refused for one reason share a row."""
    range_head = ["| parameter | type | range |", "|---|---|---|"]
    sections = [
        ("Honoured", [*range_head, *_rows("honoured")]),
        ("Translated", ["| parameter | type | equivalent |", "|---|---|---|", *_translated()]),
        ("Taken without effect", [*range_head, *_rows("ignored")]),
        ("Refused", ["| parameter | why | values that pass |", "|---|---|---|", *_refused()]),
    ]
    tables = ["\n".join([f"## {title}", "", *table, ""]) for title, table in sections]
    switches = [
        "| name | value |",
        "|---|---|",
        *(f"| `{name}` | {_switch(switch)} |" for name, switch in SWITCHES.items()),
    ]
    return "\n".join([*tables, "## `chat_template_kwargs`", "", *switches, ""])


def _rows(treated: str) -> Iterator[str]:
    for name, p in PARAMETERS.items():
        if p.treatment == treated:
            yield f"| `{name}` | {' or '.join(kind_names(p.kinds))} | {_RANGES.get(name) or _range(p)} |"


def _translated() -> Iterator[str]:
    for name, p in PARAMETERS.items():
        if p.equivalent is not None:
            equivalent = re.sub(r"\b(?!or\b)(\w+)", r"`\1`", p.equivalent)
            yield f"| `{name}` | {' or '.join(kind_names(p.kinds))} | {equivalent} |"


def _refused() -> Iterator[str]:
    names_of: dict[tuple[str, str], list[str]] = {}
    for name, p in PARAMETERS.items():
        if p.refusal is not None:
            passes = ", ".join(f"`{orjson.dumps(value).decode()}`" for value in p.accepts)
            names_of.setdefault((p.refusal, passes), []).append(f"`{name}`")
    for (why, passes), names in names_of.items():
        yield f"| {', '.join(names)} | {why} | {passes} |"


_RANGES: Mapping[str, str] = {
    "stop": f"at most {MAX_STOPS} strings of 1 to {MAX_STOP_CHARS:,} characters;"
    f" their characters times the choices at most {MAX_ALL_STOP_CHARS:,}",
    "stop_token_ids": f"at most {MAX_STOPS} token ids",
    "logit_bias": f"at most {MAX_BIASES:,} token ids, each with a number from -100 to 100;"
    f" entries times the choices at most {MAX_ALL_BIASES:,}",
    "metadata": f"at most {MAX_METADATA} entries; names of at most {MAX_METADATA_NAME_CHARS} characters,"
    f" strings of at most {MAX_METADATA_CHARS}",
    "seed": "-2^63 to 2^63 - 1; best effort, see above",
    "add_generation_prompt": "the opposite of `continue_final_message`",
    "top_logprobs": "0 to 20; needs `logprobs`",
    "stream_options": "`include_usage` and `continuous_usage_stats`; needs `stream`",
    "moderation": '`{"model": "omni-moderation-latest"}`',
}
"""What the tables show beyond `Parameter`; `check_values` and app.api.schema.chat_request enforce it."""


def _range(parameter: Parameter) -> str:
    if parameter.max_entries < math.inf:
        return f"at most {parameter.max_entries:,} entries"
    if parameter.max_chars < math.inf:
        return f"at most {parameter.max_chars:,} characters"
    low, high = parameter.minimum, parameter.maximum
    if high is not None:
        return f"{plain(low or 0)} to {plain(high)}"
    return "" if low is None else f"at least {plain(low)}"


def _switch(switch: Field) -> str:
    words = ", ".join(f"`{word}`" for word in switch.choices)
    if switch.minimum is None:
        return words or "true or false"
    noun = "a number" if float in switch.kinds else "an integer"
    numbers = f"{noun} from {switch.minimum:,} to {switch.maximum:,}"
    return f"{words}, or {numbers}" if words else numbers
