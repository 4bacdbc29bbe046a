"""The words of a text as the full-text index has them: folded, and each with a tag of its owner.

Owners share one index. Were a word the same term for all, the time of a search would show whether
another owner has it. With the tag, no two owners share a term, and a search reads its owner's alone.

    "Ann's café"  ──▶  tag·ann tag·s tag·cafe        tag: 10 hexadecimal digits

FTS5's `ascii` tokenizer tokenizes such a text at its spaces and changes nothing, so that folding is
this module's alone. SQL has it as the function `owner_words(owner, text)` (`register`).
"""

from __future__ import annotations

import hashlib
import re
import sqlite3
import unicodedata
from collections.abc import Iterator

SQL_NAME = "owner_words"
_TAG_BYTES = 5
"""Two owners of one tag would share terms again; among 1,000 owners that is one chance in two million."""
_JOINT = "·"
_MAX_WORD_CHARS = 64
"""A longer word is found by its beginning; it is data, as Base64, and would swell the index."""
_SECTION_CHARS = 1 << 16
"""Folded in one go, some milliseconds; other threads run between two."""
_SPACE = re.compile(r"\s")
_NO_WORD = re.compile(r"[\W_]+")
_MARKS = re.compile("[\u0300-\u036f]+")
"""Accents, separate from their letters as in NFKD."""
_ASCII = {code: " " for code in range(128) if not chr(code).isalnum()}


def register(connection: sqlite3.Connection) -> None:
    """Give a connection the function that the index's triggers call."""
    connection.create_function(SQL_NAME, 2, owner_words, deterministic=True)


def owner_words(owner: str, text: str) -> str:
    """The words of a text as they are indexed for an owner, separated by spaces."""
    mark = tag(owner)
    return " ".join(mark + word for section in _sections(text) for word in folded(section))


def tag(owner: str) -> str:
    """The prefix of an owner's words in the index."""
    return (
        hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=_TAG_BYTES).hexdigest() + _JOINT
    )


def folded(text: str) -> list[str]:
    """Runs of letters and digits, without case and accents, as two spellings of one letter are the same."""
    if text.isascii():
        words = text.lower().translate(_ASCII).split()
    else:
        plain = unicodedata.normalize("NFKD", text).casefold()
        words = _NO_WORD.sub(" ", unicodedata.normalize("NFC", _MARKS.sub("", plain))).split()
    if max(map(len, words), default=0) > _MAX_WORD_CHARS:
        words = [word[:_MAX_WORD_CHARS] for word in words]
    return words


def _sections(text: str) -> Iterator[str]:
    """The text in sections that end between two words, unless there is no space for as long again."""
    start = 0
    while start < len(text):
        end = start + _SECTION_CHARS
        space = _SPACE.search(text, end, end + _SECTION_CHARS)
        end = end if space is None else space.start()
        yield text[start:end]
        start = end
