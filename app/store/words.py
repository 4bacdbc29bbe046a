"""The words of a text as the full-text index has them: folded, and each with a tag of its owner.

Owners share one index. Were a word the same term for all, the time of a search would show whether
another owner has it. With the tag, no two owners share a term, and a search reads its owner's alone.

    "Ann's café"  ──▶  tag·ann tag·s tag·cafe        tag: 10 hexadecimal digits
    "京都へ"       ──▶  tag·京 tag·都 tag·へ

In scripts that write without spaces, and in Korean with its endings, each letter is a word, so that any
part of a sentence is found, as a phrase.
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
_MARKS = re.compile(
    "[\u0300-\u036f\u0591-\u05bd\u05bf\u05c1\u05c2\u05c4\u05c5\u05c7\u0610-\u061a\u0640\u064b-\u065f\u0670"
    "\u06d6-\u06dc\u06df-\u06e4\u06e7\u06e8\u06ea-\u06ed\u08d3-\u08e1\u08e3-\u08ff]+"
)
"""Accents, separate from their letters as in NFKD; Hebrew and Arabic vowels, and Arabic's long joint."""
_SIGNS = "".join(
    chr(code)
    for code in (*range(0x700, 0x1DC0), *range(0xA800, 0xAC00))
    if unicodedata.category(chr(code)).startswith("M")
)
"""Vowel signs and the like of other scripts, as Hindi's: parts of a word, which `\\w` leaves out."""
_NO_WORD = re.compile(rf"(?:[^\w{_SIGNS}]|_)+")
_LETTER_WORDS = re.compile(
    "([\u0e00-\u0eff\u1000-\u109f\u1100-\u11ff\u1780-\u17ff\u1950-\u1aaf\u1b00-\u1b7f\u2e80-\ua4cf\ua960-\ua9ff"
    "\uaa60-\uaadf\uabc0-\ud7ff\uf900-\ufaff\U0001b000-\U0001b16f\U00020000-\U0003ffff])"
)
"""Letters that are words: Thai, Lao, Burmese, Khmer, Javanese, Chinese, Japanese, Korean and others."""
_LONG_RUN = re.compile(r"([^\w\s]{32})[^\w\s]+")
"""More marks in a row than any word has. NFKD and NFC take quadratic time for them: 60,000 took 3 s."""
_ASCII = {code: " " for code in range(128) if not chr(code).isalnum()}


def register(connection: sqlite3.Connection) -> None:
    """Give a connection the function that the index's triggers call."""
    connection.create_function(SQL_NAME, 2, owner_words, deterministic=True)


def owner_words(owner: str, text: str) -> str:
    """The words of a text as they are indexed for an owner, separated by spaces."""
    mark = tag(owner)
    words = [word for section in _sections(text) for word in folded(section)]
    return mark + f" {mark}".join(words) if words else ""


def is_letter(word: str) -> bool:
    """Whether a folded word is a letter that is indexed by itself."""
    return _LETTER_WORDS.match(word) is not None


def tag(owner: str) -> str:
    """The prefix of an owner's words in the index."""
    return (
        hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=_TAG_BYTES).hexdigest() + _JOINT
    )


def folded(text: str) -> list[str]:
    """The words, without case and accents, as two spellings of one letter are the same."""
    if text.isascii():
        words = text.lower().translate(_ASCII).split()
    else:
        plain = unicodedata.normalize("NFKD", _LONG_RUN.sub(r"\1", text)).casefold()
        plain = _NO_WORD.sub(" ", unicodedata.normalize("NFC", _MARKS.sub("", plain)))
        words = " ".join(_LETTER_WORDS.split(plain)).split()
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
