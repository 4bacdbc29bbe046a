"""A rough gloss in English, word by word, of the two languages that the multilingual encoder does not know.

    text → NFKC, lower case, accents off → Hindi by its script, Indonesian by its words
         → an idiom, a word, or the longest listed stem of it → its English; other words are left out

No grammar and no order of words: enough to have a prompt watched. English text has no gloss, nor has text of
which too few words are listed. Linear in the text; keeps nothing between calls.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from app.safety.text.normalize import bounded

LEXICONS = Path(__file__).parents[1] / "lexicons"
"""A file for each language, named by its code: lines of a form, a tab and its English."""
MIN_STEM = {"hi": 3, "id": 4}
"""Letters of the shortest stem that represents a longer word, by language."""
MAX_ENDING = 5
"""Letters that a word may have behind its stem."""
MAX_IDIOM_WORDS = 4
"""Words of the longest entry of several words that is looked for."""
MIN_LISTED_SHARE = 0.35
"""The share of a text's words that has to be listed for a gloss to say anything."""
SAMPLED, SAMPLED_CHARS = 200, 400
"""Words that decide whether a text is Indonesian, and characters that decide whether it is Hindi."""
SURELY_ENGLISH = 0.75
"""The share of English words that no Indonesian text has."""
HINDI_SHARE = 0.3
"""The share of a text's letters in Devanagari that makes it Hindi."""
_DEVANAGARI = re.compile("[\u0900-\u097f]")
_BETWEEN = re.compile(r"[\s!-/:-@\[-`{-~\u00a0-\u00bf\u2000-\u206f\u3000-\u303f\u060c\u061b\u061f\u0964]+")
_PIECE = re.compile(r"\S{1,48}|\s+")
"""A part that is brought into NFKC at a time: a long run of marks takes quadratic time."""


class Lexicon(NamedTuple):
    """A language: English by form, and the first words of idioms."""

    english: Mapping[str, str]
    openers: frozenset[str]
    least_stem: int

    @classmethod
    def read(cls, path: Path) -> Lexicon:
        """The lexicon of a file. Raises OSError, or ValueError for a wrong line."""
        english: dict[str, str] = {}
        for line in path.read_text("utf-8").splitlines():
            form, _, meaning = line.partition("\t")
            if not (form and meaning):
                raise ValueError(f"lexicon {path.stem}: {line!r} is no form, tab and English")
            english.setdefault(_BETWEEN.sub(" ", plain_form(form)).strip(), meaning)
        openers = frozenset(form.split()[0] for form in english if " " in form)
        return cls(english, openers, MIN_STEM[path.stem])

    def gloss(self, words: Sequence[str], also: frozenset[str]) -> Iterator[str | None]:
        """For each word or idiom its English, None if it is not listed; words of `also` stay as they are."""
        at = 0
        while at < len(words):
            longest = min(MAX_IDIOM_WORDS, len(words) - at) if words[at] in self.openers else 1
            for length in range(longest, 1, -1):
                if english := self.english.get(" ".join(words[at : at + length])):
                    yield english
                    at += length
                    break
            else:
                yield self._word(words[at]) or (words[at] if words[at] in also else None)
                at += 1

    def _word(self, word: str) -> str | None:
        """The English of a word, or of the longest stem of it."""
        shortest = max(self.least_stem, len(word) - MAX_ENDING)
        stems = [word, *(word[:end] for end in range(len(word) - 1, shortest - 1, -1))]
        return next(filter(None, map(self.english.get, stems)), None)


class Glosser:
    """The lexicons of Hindi and Indonesian. Immutable; may be called from any thread."""

    def __init__(self, hindi: Lexicon, indonesian: Lexicon) -> None:
        self._hindi = hindi
        self._indonesian = indonesian
        meanings = (*hindi.english.values(), *indonesian.english.values())
        self._english = frozenset(word for english in meanings for word in english.split())

    @classmethod
    def load(cls, folder: Path = LEXICONS) -> Glosser:
        """The lexicons of a folder. Raises OSError, or ValueError for a wrong line."""
        return cls(Lexicon.read(folder / "hi.tsv"), Lexicon.read(folder / "id.tsv"))

    def gloss(self, text: str) -> str | None:
        """The text word by word in English; None if it is English, or too little of it is known."""
        plain = plain_form(text)
        words = _BETWEEN.sub(" ", plain).split()
        if _is_hindi(plain):
            lexicon = self._hindi
        elif self._is_indonesian(words[:SAMPLED]):
            lexicon = self._indonesian
        else:
            return None
        glosses = list(lexicon.gloss(words, self._english))
        listed = [english for english in glosses if english]
        return " ".join(listed) if listed and len(listed) >= MIN_LISTED_SHARE * len(glosses) else None

    def _is_indonesian(self, words: Sequence[str]) -> bool:
        """True if more of the words are listed than are English, and not nearly all are English."""
        num_english = sum(map(self._english.__contains__, words))
        num_listed = sum(map(self._indonesian.english.__contains__, words))
        return num_english < num_listed and num_english <= SURELY_ENGLISH * len(words)


def plain_form(text: str) -> str:
    """The form in which lexicons and texts meet: NFKC, lower case, Latin letters without accents."""
    if text.isascii():
        return text.lower()
    composed = "".join(unicodedata.normalize("NFKC", piece) for piece in _PIECE.findall(bounded(text)))
    lower = composed.lower()
    if lower.isascii():
        return lower
    table = {ord(char): _bare(char) for char in set(lower) if "\x7f" < char < "\u0370"}
    return lower.translate(table)


def _bare(char: str) -> str:
    return "".join(piece for piece in unicodedata.normalize("NFD", char) if not unicodedata.combining(piece))


def _is_hindi(plain: str) -> bool:
    """True if a good part of the first letters are Devanagari."""
    some = "" if plain.isascii() else plain[:SAMPLED_CHARS]
    return len(_DEVANAGARI.findall(some)) > HINDI_SHARE * max(sum(map(str.isalpha, some)), 1)
