"""Groups of texts that may fare differently at a screen: by length, by role, by script."""

from __future__ import annotations

import unicodedata
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
_SCRIPTS = ("latin", "greek", "cyrillic", "hebrew", "arabic", "devanagari", "thai", "hangul", "kana", "han")
_UNICODE_NAMES = {name.upper(): name for name in _SCRIPTS}
_UNICODE_NAMES |= {"HIRAGANA": "kana", "KATAKANA": "kana", "KATAKANA-HIRAGANA": "kana", "CJK": "han"}
"""First words of the Unicode names of letters, and the scripts of these."""
SCRIPTS = (*_SCRIPTS, "other", "none")
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
    words = (unicodedata.name(char, "").partition(" ")[0] for char in sample if char.isalpha())
    counts = Counter(_UNICODE_NAMES.get(word, "other") for word in words)
    return max(counts, key=lambda name: counts[name], default="none")
