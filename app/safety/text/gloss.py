"""A rough gloss in English, word by word, of the two languages that the multilingual encoder does not know.

    text → NFKC, lower case, accents off → Hindi by its script, Indonesian by its words
         → an idiom, a word, or the longest listed stem of it → its English; other words are left out

No grammar and no order of words: enough to have a prompt watched. English text has no gloss, nor has text of
which too few words are listed. Linear in the text; keeps nothing between calls.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

LEXICONS = Path(__file__).parents[1] / "lexicons"
"""A file for each language, named by its code: lines of a form, a tab and its English."""
LEAST_STEM = {"hi": 3}
"""Letters of the shortest stem that stands for a longer word, by language; 4 in all others."""
LONGEST_ENDING = 5
"""Letters that a word may have behind its stem."""
LONGEST_IDIOM = 4
"""Words of the longest entry of several words that is looked for."""
LEAST_LISTED = 0.35
"""The share of a text's words that has to be listed for a gloss to say anything."""
MOST_EXPANDED = 2
"""How many times longer NFKC may make a text, of which one character may become eighteen."""
SAMPLED, SAMPLED_CHARS = 200, 400
"""Words that decide what language a text in Latin letters is in, and characters that decide its script."""
SURELY_ENGLISH = 0.75
"""The share of English words that no other language's text has."""
OTHER_SHARE = 0.3
"""The share of a text's letters that makes it one of another script than Latin."""
_SCRIPTS = {"hi": re.compile("[\u0900-\u097f]")}
_BETWEEN = re.compile(r"[\s!-/:-@\[-`{-~\u00a0-\u00bf\u2000-\u206f\u3000-\u303f\u060c\u061b\u061f\u0964]+")
_PIECE = re.compile(r"\S{1,48}|\s+")
"""What is brought into NFKC at a time: a long run of marks takes quadratic time."""


class Lexicon(NamedTuple):
    """A language: English by form, and the first words of idioms."""

    code: str
    english: Mapping[str, str]
    openers: frozenset[str]
    least_stem: int

    def gloss(self, words: Sequence[str], also: frozenset[str]) -> list[str | None]:
        """For each word or idiom its English, None if it is not listed; words of `also` stay as they are."""
        glosses: list[str | None] = []
        at = 0
        while at < len(words):
            taken, english = self._idiom(words, at) if words[at] in self.openers else (0, None)
            if not taken:
                word = words[at]
                taken, english = 1, self.word(word) or (word if word in also else None)
            glosses.append(english)
            at += taken
        return glosses

    def _idiom(self, words: Sequence[str], at: int) -> tuple[int, str | None]:
        for length in range(min(LONGEST_IDIOM, len(words) - at), 1, -1):
            english = self.english.get(" ".join(words[at : at + length]))
            if english is not None:
                return length, english
        return 0, None

    def word(self, word: str) -> str | None:
        """The English of a word, or of the longest stem of it."""
        english = self.english.get(word)
        if english is not None:
            return english
        for end in range(len(word) - 1, max(self.least_stem, len(word) - LONGEST_ENDING) - 1, -1):
            english = self.english.get(word[:end])
            if english is not None:
                return english
        return None


class Glosser:
    """The lexicons of all languages. Immutable; may be called from any thread."""

    def __init__(self, lexicons: Iterable[Lexicon]) -> None:
        self._of = {lexicon.code: lexicon for lexicon in lexicons}
        self._latin = [lexicon for code, lexicon in self._of.items() if code not in _SCRIPTS]
        self._english = frozenset(
            word
            for lexicon in self._of.values()
            for english in lexicon.english.values()
            for word in english.split()
        )

    @classmethod
    def load(cls, folder: Path = LEXICONS) -> Glosser:
        """The lexicons of a folder. Raises OSError, or ValueError for no lexicon or a wrong line."""
        paths = sorted(folder.glob("*.tsv"))
        if not paths:
            raise ValueError(f"{folder} holds no lexicon")
        return cls(_parsed(path.stem, path.read_text("utf-8")) for path in paths)

    def gloss(self, text: str) -> str | None:
        """The text word by word in English; None if it is English, or too little of it is known."""
        plain = plain_form(text)
        code = _script(plain)
        words = _BETWEEN.sub(" ", plain).split()
        lexicon = self._of.get(code) if code else self._language(words)
        return None if lexicon is None else _joined(lexicon.gloss(words, self._english), LEAST_LISTED)

    def _language(self, words: Sequence[str]) -> Lexicon | None:
        """The language in Latin letters that lists most of the words, if that is more than English does."""
        some = words[:SAMPLED]
        best, num_listed = None, sum(map(self._english.__contains__, some))
        if num_listed > SURELY_ENGLISH * len(some):
            return None
        for lexicon in self._latin:
            number = sum(map(lexicon.english.__contains__, some))
            if number > num_listed:
                best, num_listed = lexicon, number
        return best


def _joined(glosses: Sequence[str | None], least: float) -> str | None:
    """The gloss of a text, if at least this share of its words or characters has one."""
    listed = [english for english in glosses if english]
    return " ".join(listed) if listed and len(listed) >= least * len(glosses) else None


def plain_form(text: str) -> str:
    """The form in which lexicons and texts meet: NFKC, lower case, Latin letters without accents."""
    if text.isascii():
        return text.lower()
    composed = "".join(unicodedata.normalize("NFKC", piece) for piece in _PIECE.findall(text))
    lower = composed[: MOST_EXPANDED * len(text)].lower()
    if lower.isascii():
        return lower
    table = {ord(char): _bare(char) for char in set(lower) if "\x7f" < char < "\u0370"}
    return lower.translate(table)


def _bare(char: str) -> str:
    return "".join(piece for piece in unicodedata.normalize("NFD", char) if not unicodedata.combining(piece))


def _script(plain: str) -> str | None:
    """The language that the script of a good part of the letters stands for; None for Latin ones."""
    if plain.isascii():
        return None
    some = plain[:SAMPLED_CHARS]
    letters = sum(map(str.isalpha, some))
    for code, own in _SCRIPTS.items():
        if len(own.findall(some)) > OTHER_SHARE * max(letters, 1):
            return code
    return None


def _parsed(code: str, table: str) -> Lexicon:
    english: dict[str, str] = {}
    for line in table.splitlines():
        form, tab, meaning = line.partition("\t")
        if not (form and tab and meaning):
            raise ValueError(f"lexicon {code}: {line!r} is no form, tab and English")
        english.setdefault(_BETWEEN.sub(" ", plain_form(form)).strip(), meaning)
    openers = frozenset(form.split()[0] for form in english if " " in form)
    return Lexicon(code, english, openers, LEAST_STEM.get(code, 4))
