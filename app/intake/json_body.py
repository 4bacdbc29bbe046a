"""A request's body as JSON, at a bounded cost: its values are counted before it is parsed.

A parser makes an object of each value: up to 100 bytes and 100 ns for every two bytes of the body. It holds
the interpreter's lock meanwhile. So the values are counted on the raw bytes first, and a large body is
counted and parsed in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import sys
from typing import Any

import orjson

from app.concurrency.owner_threads import LARGE_BYTES
from app.errors import BadRequest

MAX_DEPTH = 64
"""Greatest nesting of arrays and objects in a body; schemas that people write stay below 20."""

MAX_VALUES = 100_000
"""Values (strings, numbers, arrays, objects …) in one body, whatever their length.

2,048 messages with tool calls and 128 tools with large schemas stay below a third of it; parsing as many
takes 15 ms, and freeing them 4 ms."""

_NAMED_UP_TO_BYTES = 1 << 20
"""Greatest body in bytes that is parsed again to name the repeated member in the error."""

_CHUNK_BYTES = 512 * 1024
"""Bytes that are counted at once, in about 1 ms; between two chunks other tasks run."""


async def fingerprint(raw: bytes) -> bytes:
    """The SHA-256 of a body, in a thread where it is large."""
    if len(raw) <= LARGE_BYTES:
        return hashlib.sha256(raw).digest()
    return await asyncio.to_thread(lambda: hashlib.sha256(raw).digest())


def parse_body(raw: bytes) -> dict[str, Any]:
    """The JSON object in `raw`.

    Raises BadRequest: broken, not UTF-8, no object, too many values, too deep, a name twice in one object.
    """
    # A value takes two bytes, itself and what separates it from the next.
    if len(raw) > 2 * MAX_VALUES and count_values(raw, MAX_VALUES) > MAX_VALUES:
        raise BadRequest(
            f"The body has more than {MAX_VALUES:,} JSON values; send fewer, longer texts.",
            code="too_many_values",
        )
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as exc:
        raise _unreadable(raw, exc) from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.", code="invalid_json")
    check_unique_names(raw, body)
    return body


def count_values(raw: bytes, limit: int = sys.maxsize, chunk_bytes: int = _CHUNK_BYTES) -> int:
    """The number of values in JSON text, empty arrays and objects counted twice; stops over `limit`.

    Without escaped characters a quotation mark begins or ends a string, and what stands between an even
    number of marks and the next is structure. Each value but a container's first has a comma in front.
    Where the text is not JSON, the count holds up to where a parser stops. It takes 3 ms for a megabyte.
    """
    values, marks, start = 1, 0, 0
    while start < len(raw) and values <= limit:
        end = start + chunk_bytes
        while raw[end - 1 : end] == b"\\":  # not between a backslash and what it escapes
            end += chunk_bytes
        chunk = raw[start:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        start = end
        in_string = marks % 2
        marks += chunk.count(b'"')
        if marks > 4 * limit:  # two around a name, two around its value
            return limit + 1
        structure = b"".join(chunk.split(b'"')[in_string::2])
        values += structure.count(b",") + structure.count(b"[") + structure.count(b"{")
    return values


def _unreadable(raw: bytes, exc: orjson.JSONDecodeError) -> BadRequest:
    if exc.msg == "depth limit exceeded":  # orjson's own, at 1,024 levels
        return _too_deep()
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as wrong:
        at = wrong.start
        return BadRequest(
            f"The body is not UTF-8: byte {at} is {raw[at]:#04x}.",
            code="invalid_encoding",
        )
    return BadRequest(
        f"The body is not JSON: {exc.msg} at line {exc.lineno}, column {exc.colno}.",
        code="invalid_json",
    )


def _too_deep() -> BadRequest:
    return BadRequest(f"The body nests deeper than {MAX_DEPTH} levels.", code="nesting_too_deep")


def check_unique_names(raw: bytes, body: dict[str, Any]) -> None:
    """Raise BadRequest where the JSON text `raw` has more members than what was parsed of it, or is too deep.

    JSON parsers disagree on which of two members of one name counts (RFC 8259, section 4): a proxy in front
    would check another request than the one that is answered here, where the last counts.
    """
    if _num_colons(raw) == _num_members(body):
        return
    name = _first_repeated(raw) if len(raw) <= _NAMED_UP_TO_BYTES else None
    named = "a member" if name is None else f"{name!r}"
    raise BadRequest(
        f"The body has {named} twice in one object; send it once.", code="invalid_json", param=name
    )


def _num_colons(raw: bytes) -> int:
    """Colons of a JSON text that stand outside its strings: one a member."""
    if b"\\" in raw:  # escapes, from the left: the remaining quotes begin and end strings
        raw = raw.replace(rb"\\", b"").replace(rb"\"", b"")
    return b"".join(raw.split(b'"')[::2]).count(b":")


def _num_members(body: Any) -> int:
    """Members of all objects in a JSON value. Raises BadRequest for a value deeper than `MAX_DEPTH`."""
    number, depth, level = 0, 0, [body]
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below: list[Any] = []
        for value in level:
            children = value
            if type(value) is dict:
                number += len(value)
                children = value.values()
            below += [child for child in children if type(child) is dict or type(child) is list]
        level = below
    return number


def _first_repeated(raw: bytes) -> str | None:
    repeated: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        names: set[str] = set()
        for name, _ in pairs:
            if name in names:
                repeated.append(name)
            names.add(name)

    json.loads(raw, object_pairs_hook=look)
    return repeated[0] if repeated else None
