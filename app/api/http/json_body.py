"""A request's body as JSON, at a bounded cost: its values are counted before it is parsed.

A parser makes an object of each value: up to 100 bytes and 100 ns for every two bytes of the body. It holds
the interpreter's lock meanwhile. So the values are counted on the raw bytes first, and a large body is
counted and parsed in a thread.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from typing import Any

import orjson

from app.api.http.unique_names import check_unique_names
from app.concurrency.owner_threads import LARGE_BYTES
from app.errors import BadRequest

MAX_DEPTH = 64
"""Greatest nesting of arrays and objects in a body; schemas that people write stay below 20."""

MAX_VALUES = 100_000
"""Values (strings, numbers, arrays, objects …) in one body, whatever their length.

2,048 messages with tool calls and 128 tools with large schemas stay below a third of it; parsing as many
takes 15 ms, and freeing them 4 ms."""

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
    if raw.count(b"[") + raw.count(b"{") > MAX_DEPTH:
        _check_depth(body)
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


def _check_depth(body: Any) -> None:
    level, depth = [body], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _too_deep()
        below = []
        for value in level:
            children = value.values() if isinstance(value, dict) else value
            below += [child for child in children if isinstance(child, dict | list)]
        level = below
