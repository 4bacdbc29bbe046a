"""The first difference of two system prompts, tool lists or rows of token ids.

Everything is linear in its input; regular expressions see a window of `_WINDOW` characters.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeVar

import orjson

Kind = Literal["clock", "id", "text", "added", "removed", "order", "changed"]
"""The kind of a difference: in texts a clock, an id or other text; in tool lists, that of the first tool."""

_WINDOW = 96
_SHOWN_CHARACTERS = 80
_COMPARED_CHARACTERS = 16_384
_SAME_WORDS = 0.6
_FEWEST_WORDS = 8
_FEWEST_DIGITS = 4
_SHORTEST_ID = 8

_DATE = r"\d{4}-\d{2}-\d{2}|\d{4}/\d{1,2}/\d{1,2}|\d{1,2}[/.]\d{1,2}[/.](?:\d{4}|\d{2})"
_TIME = r"\d{1,2}:\d{2}(?::\d{2}(?:[.,]\d{1,9})?)?(?: ?[AaPp](?:[Mm]\b|\.[Mm]\.))?(?:Z|[+-]\d{2}:?\d{2})?"
_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?"
    r"|Sep(?:t(?:ember)?)?|Oct(?:ober)?|Nov(?:ember)?|Dec(?:ember)?)\b"
)
_NAMED = (
    rf"(?:\d{{1,2}}(?:st|nd|rd|th)? (?:of )?)?{_MONTH}\.?(?: \d{{1,2}}(?:st|nd|rd|th)?\b)?(?:,? \d{{4}})?"
)
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?\b"
_PIECE = rf"(?:{_DATE}|{_TIME}|{_NAMED}|{_DAY}|UTC|GMT)"
_CLOCK = re.compile(rf"{_PIECE}(?:(?:,? at |[ ,T]{{1,2}}){_PIECE})*")
_EPOCH = re.compile(r"(?<!\d)(?:1[2-9]|2[0-4])\d{8}(?:\.\d{1,6}|\d{3}|\d{6}|\d{9})?(?!\d)")
_PATTERNS: Mapping[Kind, Sequence[re.Pattern[str]]] = {
    "clock": (_CLOCK, _EPOCH),
    "id": (re.compile(r"[0-9A-Za-z_\-]+"),),
}

Item = TypeVar("Item")


class Difference(NamedTuple):
    """The first place where a new text, list or prompt is not the old one.

    `position` and `length` are of what stands there, a whole clock or id where it is one: characters of
    the new text, the number of a tool, or that of a token.
    """

    kind: str
    """A `Kind`, or what else the difference is by."""
    position: int
    length: int
    shown: str = ""
    """The beginning of that text, which is the caller's own and shown to no other."""


def text_difference(old: str, new: str) -> Difference:
    """The first difference of a text from its predecessor. They are not equal."""
    at = common_prefix(old, new)
    for kind in _PATTERNS:
        span = _span(kind, new, at)
        if span is not None and _span(kind, old, at) is not None:
            start, end = span
            return Difference(kind, start, end - start, new[start:end][:_SHOWN_CHARACTERS])
    end = len(new) - _common_suffix(old, new, at)
    return Difference("text", at, end - at, new[at:end][:_SHOWN_CHARACTERS])


def tools_difference(old: bytes, new: bytes) -> Difference:
    """The first tool in which two lists, as JSON, differ. They are not equal."""
    old_tools, new_tools = _tools(old), _tools(new)
    at = common_prefix(old_tools, new_tools)
    if at == len(old_tools) == len(new_tools):  # no lists, or the same but for how numbers are written
        return Difference("changed", at, 0)
    if sorted(old_tools) == sorted(new_tools):
        kind: Kind = "order"
    elif len(old_tools) == len(new_tools):
        kind = "changed"
    else:
        kind = "added" if len(old_tools) < len(new_tools) else "removed"
    return Difference(kind, at, min(1, len(new_tools) - at))


def similar(old: str, new: str) -> bool:
    """True if a text is likely another edition of the other: half of it stands in place, or most words do."""
    old, new = old[:_COMPARED_CHARACTERS], new[:_COMPARED_CHARACTERS]
    at = common_prefix(old, new)
    if 2 * (at + _common_suffix(old, new, at)) >= max(len(old), len(new)):
        return True
    words, others = set(old.split()), set(new.split())
    longest = max(len(words), len(others))
    return longest >= _FEWEST_WORDS and len(words & others) >= _SAME_WORDS * longest


def common_prefix(a: Sequence[Item], b: Sequence[Item]) -> int:
    """The number of items that two sequences of one type begin with in common; compares slices, not items."""
    low, high = 0, min(len(a), len(b))
    if a[:high] == b[:high]:
        return high
    while high - low > 1:  # a[:low] == b[:low], a[:high] != b[:high]
        middle = (low + high) // 2
        if a[low:middle] == b[low:middle]:
            low = middle
        else:
            high = middle
    return low


def _common_suffix(a: str, b: str, at: int) -> int:
    """The number of characters that two texts end with in common, after the `at` that they begin with."""
    longest = min(len(a), len(b)) - at
    return common_prefix(a[len(a) - longest :][::-1], b[len(b) - longest :][::-1])


def _span(kind: Kind, text: str, at: int) -> tuple[int, int] | None:
    """The clock or the id that `at` is in, or right behind."""
    begin = max(at - _WINDOW, 0)
    for pattern in _PATTERNS[kind]:
        for match in pattern.finditer(text[begin : at + _WINDOW]):
            start, end = begin + match.start(), begin + match.end()
            if start <= at <= end and (kind == "clock" or _is_id(match.group())):
                return start, end
    return None


def _is_id(word: str) -> bool:
    digits = sum(map(str.isdigit, word))
    return digits >= _FEWEST_DIGITS or (len(word) >= _SHORTEST_ID and digits > 1)


def _tools(raw: bytes) -> list[bytes]:
    tools: Any = orjson.loads(raw) if raw else []
    return [orjson.dumps(tool) for tool in tools] if isinstance(tools, list) else [raw]
