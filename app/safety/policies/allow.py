"""The operator's list of users' turns that the classifiers refuse by mistake.

An entry is a phrase, or a whole turn by its SHA-256, so that no file holds the text. It must not become a
password: what an entry names is taken out of the turn once, the rest is judged for itself, and a turn of
which the phrases are not at least half is not touched.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

MAX_ENTRIES = 100
MIN_PHRASE_CHARS, MAX_PHRASE_CHARS = 12, 300
"""Visible characters of a phrase, and all of them: a short phrase would be in texts of every kind."""
MAX_TURN_CHARS = 4_000
"""Characters of a turn that phrases can be half of; it also bounds the search."""


@dataclass(frozen=True, slots=True)
class AllowEntry:
    """One entry: a phrase or a digest, why it is allowed and since when."""

    reason: str
    date: dt.date
    phrase: str | None = None
    sha256: str | None = None
    expires: dt.date | None = None
    """The first UTC day on which the entry is no longer in force."""


class Rest(NamedTuple):
    """The rest of a turn, and the numbers from 1 of the entries that allow what was taken out."""

    text: str
    entries: Sequence[int]


class Allow:
    """The entries of a policy file, those in force when a text is judged."""

    def __init__(self, entries: Sequence[AllowEntry], today: dt.date | None = None) -> None:
        """`today` is the UTC day for tests; else it is read each time."""
        self._entries = entries
        self._today = today

    def entry(self, number: int) -> AllowEntry:
        return self._entries[number - 1]

    def in_force(self) -> list[tuple[int, AllowEntry]]:
        """The entries that have not expired, by their numbers from 1."""
        today = self._today or dt.datetime.now(dt.UTC).date()
        numbered = enumerate(self._entries, start=1)
        return [(n, entry) for n, entry in numbered if entry.expires is None or today < entry.expires]

    def rest(self, turn: str) -> Rest:
        """A user's turn without what is allowed; the whole turn if nothing of it is."""
        entries = self.in_force()
        digest = digest_of(turn) if any(entry.sha256 for _, entry in entries) else ""
        whole = [number for number, entry in entries if entry.sha256 and entry.sha256 == digest]
        if whole:
            return Rest("", whole)
        return _without([(number, entry.phrase) for number, entry in entries if entry.phrase], turn)


def digest_of(turn: str) -> str:
    """The SHA-256 of a turn in hex, with its runs of white space as one space and none at its ends."""
    return hashlib.sha256(" ".join(turn.split()).encode("utf-8", "surrogatepass")).hexdigest()


def _without(phrases: Sequence[tuple[int, str]], turn: str) -> Rest:
    """The turn without the first occurrence of each phrase, if these are half of it; repeats are rest.

    The rest keeps its letters as they are, because what is written in base64 depends on their case.
    """
    if len(turn) > MAX_TURN_CHARS:
        return Rest(turn, ())
    folded = " ".join(turn.split()).casefold()
    likely = [(number, phrase) for number, phrase in phrases if " ".join(phrase.split()).casefold() in folded]
    matches = [(m.span(), number) for number, phrase in likely if (m := _pattern(phrase).search(turn))]
    pieces, end = [], 0
    for (start, stop), _ in sorted(matches):
        pieces.append(turn[end : max(start, end)])
        end = max(end, stop)
    rest = " ".join([*pieces, turn[end:]]).strip()
    if not matches or 2 * _visible(rest) > _visible(turn):
        return Rest(turn, ())
    return Rest(rest, [number for _, number in matches])


def _pattern(phrase: str) -> re.Pattern[str]:
    return re.compile(r"\s+".join(map(re.escape, phrase.split())), re.IGNORECASE)


def _visible(text: str) -> int:
    return sum(not char.isspace() for char in text)
