"""Text as the classifiers see it: one plain form, and a few further views of what is disguised.

    text → NFKD without marks, zero-width, bidi, tags → look-alikes → casefold → single spaces   plain
         → invisible characters out, letters joined, words parted; marks stay                  views
         → hidden or encoded text read, letters joined, leet read, rot13, reversed

A further view is made only where something cheap says so; ordinary text has none. Everything is
linear in the text, and nothing is kept between calls. Knows text, not what is in it.
"""

from __future__ import annotations

import codecs
import itertools
import re
import unicodedata

from app.safety.text.confusables import CONFUSABLES, PARENTHESIZED
from app.safety.text.disguises import decoded, looks_reversed, looks_rot13, respelled, revealed
from app.safety.text.invisible import BRAILLE_BLANK, is_unseen

MAX_VIEWS = 5
_SPACES = re.compile(r"(\s)")
_MAX_DECOMPOSITION = 4
"""Ligatures of whole phrases stay as they are, so that a text cannot grow eighteenfold."""
_PHRASES_CHARS = 256
"""Characters that such ligatures may add to a short text."""
_TAGS = range(0xE0020, 0xE007F)
"""Tag characters that mirror printable ASCII: unseen by people, read by some models."""
_RIGHT_TO_LEFT = "\u202e"


def normalize(text: str) -> str:
    """The plain form: NFKC without marks and unseen characters, look-alikes as Latin, casefolded.

    White space becomes single spaces. Applying it again changes nothing.
    """
    return _plain(folded(text))


def views(text: str, limit: int = MAX_VIEWS) -> list[str]:
    """The possible readings of the text, normalized, at most `limit`: the plain form, then others.

    The second may equal the plain form, where an encoder has read the text itself in place of that.
    """
    shown = folded(text)
    plain = _plain(shown)
    clearer = revealed(text)
    views = [] if clearer is None or (clearer == plain and plain.isascii()) else [clearer]
    hidden = "" if text.isascii() else _tagged(text)
    if hidden:
        views.append(normalize(hidden))
    clear = decoded(shown, plain)
    read = respelled(shown if clear is None else folded(clear))
    if clear is not None or read is not None:
        views.append(normalize(read or clear or ""))
    base = plain if clear is None else normalize(clear)
    words = set(base.split())
    if looks_rot13(base, words):
        views.append(codecs.encode(base, "rot13"))
    if _RIGHT_TO_LEFT in text or looks_reversed(base, words):
        views.append(base[::-1])
    others = [view for view in dict.fromkeys(views) if view and (view != plain or view is clearer)]
    return [plain, *others][:limit]


def bounded(text: str) -> str:
    """The text with spaces for phrases in one character, as U+FDFA is, once NFKC doubles the text by them.

    An encoder reads NFKC, and one such character takes it the time of eighteen. Some of them always stay.
    """
    if text.isascii():
        return text
    added = {char: len(unicodedata.normalize("NFKC", char)) - 1 for char in set(text)}
    phrases = {char: more for char, more in added.items() if more >= _MAX_DECOMPOSITION}
    if not phrases:
        return text
    limit = max(len(text), _PHRASES_CHARS)
    so_far = itertools.accumulate(phrases.get(char, 0) for char in text)
    shown = zip(text, so_far, strict=True)
    return "".join(" " if char in phrases and more > limit else char for char, more in shown)


def _plain(folded: str) -> str:
    """A folded text in lower case with single spaces."""
    lower = folded.lower() if folded.isascii() else folded.casefold()
    plain = " ".join(lower.split())
    return plain if plain.isprintable() else " ".join("".join(filter(str.isprintable, plain)).split())


def folded(text: str) -> str:
    """The text with its characters made plain; case and white space as they were."""
    if text.isascii():
        return text
    # Character by character, since normalizing a long run of marks takes quadratic time.
    text = text.translate({ord(char): _decomposed(char) for char in set(text) if char > "\x7f"})
    return text if text.isascii() else "".join(map(_as_latin, _SPACES.split(text)))


def _decomposed(char: str) -> str:
    """A character as NFKD has it, without what is not seen."""
    if is_unseen(char):
        return ""
    if char == BRAILLE_BLANK:
        return " "
    char = PARENTHESIZED.get(ord(char), char)
    if unicodedata.is_normalized("NFKD", char):
        return char
    parts = unicodedata.normalize("NFKD", char)
    if len(parts) > _MAX_DECOMPOSITION:
        return char
    return unicodedata.normalize("NFC", "".join(piece for piece in parts if not is_unseen(piece)))


def _as_latin(word: str) -> str:
    """A word with look-alikes as Latin letters, unless most of it is of another script after all."""
    if word.isascii():
        return word
    latin = word.translate(CONFUSABLES)
    if latin.isascii():
        return latin
    letters = [char for char in latin if char.isalpha()]
    foreign = sum(char > "\x7f" for char in letters)
    return latin if len(letters) >= 4 * foreign else word


def _tagged(text: str) -> str:
    """The text that tag characters spell."""
    if ord(max(text)) < _TAGS.start:
        return ""
    return "".join(chr(ord(char) - 0xE0000) for char in text if ord(char) in _TAGS)
