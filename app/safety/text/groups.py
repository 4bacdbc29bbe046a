"""Groups of texts that may fare differently at a screen: by length, by role, by script."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from typing import NamedTuple

GROUPINGS = ("category", "key", "length", "role", "script", "day")
"""The properties by which a report can group the texts of a server."""
LENGTHS = ("0-99", "100-499", "500-1999", "2000-9999", "10000+")
"""Characters of the text."""
_BOUNDS = (100, 500, 2_000, 10_000)
SAMPLE_CHARS = 100
"""Characters from the beginning that tell the script; more would cost every text that is not ASCII."""
_SCRIPTS: tuple[tuple[int, str], ...] = (
    (0x0000, "latin"),
    (0x0250, "other"),
    (0x0370, "greek"),
    (0x0400, "cyrillic"),
    (0x0530, "other"),
    (0x0590, "hebrew"),
    (0x0600, "arabic"),
    (0x0700, "other"),
    (0x0750, "arabic"),
    (0x0780, "other"),
    (0x0900, "devanagari"),
    (0x0980, "other"),
    (0x0E00, "thai"),
    (0x0E80, "other"),
    (0x1100, "hangul"),
    (0x1200, "other"),
    (0x1E00, "latin"),
    (0x1F00, "greek"),
    (0x2000, "other"),
    (0x3040, "kana"),
    (0x3100, "other"),
    (0x3400, "han"),
    (0xA000, "other"),
    (0xAC00, "hangul"),
    (0xD7B0, "other"),
    (0x20000, "han"),
    (0x40000, "other"),
)
"""First code point of a run of blocks, and the script of most letters in it (Blocks.txt of Unicode 16)."""
_STARTS = tuple(start for start, _ in _SCRIPTS)
SCRIPTS = (*dict.fromkeys(name for _, name in _SCRIPTS), "none")
"""Every script that a group may have; `none` is a text without letters."""
_ROLES = frozenset({"user", "system", "developer", "tool", "assistant"})


class Group(NamedTuple):
    """The group of a request, by its newest message."""

    length: str
    role: str
    script: str


def group_of(text: str, role: object) -> Group:
    """The group of a message's text; a role that no message has is `other`."""
    length = LENGTHS[bisect_right(_BOUNDS, len(text))]
    return Group(length, role if isinstance(role, str) and role in _ROLES else "other", script_of(text))


def script_of(text: str) -> str:
    """The script of most letters at the beginning of a text, as one of SCRIPTS."""
    sample = text[:SAMPLE_CHARS]
    if sample.isascii():
        return "latin" if sample.lower() != sample.upper() else "none"
    counts = Counter(_SCRIPTS[bisect_right(_STARTS, ord(c)) - 1][1] for c in sample if c.isalpha())
    return max(counts, key=lambda name: counts[name], default="none")
