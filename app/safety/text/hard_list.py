"""Exact spans that may never be released, found in text that is read in chunks (Aho and Corasick, 1975).

Text is folded character by character, so that a chunk can end anywhere: compatibility forms,
look-alikes, case, accents and invisible characters make no difference, and a run of white space is
one space. A state says how much of the text's end may yet become a span. Linear in the text,
whatever it is; knows nothing of streams.
"""

from __future__ import annotations

import unicodedata
from collections import deque
from collections.abc import Iterable, Sequence

from app.safety.text.confusables import CONFUSABLES
from app.safety.text.invisible import BRAILLE_BLANK, is_unseen

FOUND = -1
"""The state after a complete span; it is final."""
MARKS = "*_`~"
"""Markdown's marks, which a client shows as type: part of a word may be bold."""
_REMEMBERED = 20_000


class _Folding(dict[int, str]):
    """Code point → folded text, worked out when it is first met; for `str.translate`."""

    def __missing__(self, code: int) -> str:
        if len(self) >= _REMEMBERED:
            self.clear()
        folded = self[code] = _folded(chr(code))
        return folded


class HardList:
    """The spans of one policy, compiled. Raises ValueError for a span of which nothing is left folded."""

    def __init__(self, spans: Iterable[str]) -> None:
        self._folding = _Folding()
        self._next: list[dict[str, int]] = [{}]
        self._fallback: list[int] = [0]
        self._ends: list[bool] = [False]
        self.depth: list[int] = [0]
        """By state: the number of folded characters at the end of the text that may still become a span."""
        for span in spans:
            self._add(" ".join(span.translate(self._folding).split()))
        self._link()
        self._firsts = frozenset(self._next[0])
        listed = frozenset().union(*self._next)
        self.marks = dict.fromkeys(ord(mark) for mark in MARKS if mark not in listed)
        """For `str.translate`: marks of Markdown that are in no span."""

    def _add(self, folded: str) -> None:
        if not folded:
            raise ValueError("a hard-listed span has no visible character")
        state = 0
        for char in folded:
            next_state = self._next[state].get(char)
            if next_state is None:
                next_state = len(self._next)
                self._next[state][char] = next_state
                self._next.append({})
                self._fallback.append(0)
                self._ends.append(False)
                self.depth.append(self.depth[state] + 1)
            state = next_state
        self._ends[state] = True

    def _link(self) -> None:
        """Let every state fall back to the longest end of its text that another span begins with."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, longer in self._next[state].items():
                queue.append(longer)
                shorter = self._fallback[state]
                while shorter and char not in self._next[shorter]:
                    shorter = self._fallback[shorter]
                self._fallback[longer] = self._next[shorter].get(char, 0)
                self._ends[longer] |= self._ends[self._fallback[longer]]

    def fold(self, text: str, *, after_space: bool) -> str:
        """The text as it is matched; `after_space` says that a space stands before it."""
        folded = text.translate(self._folding)
        if "  " in folded or (after_space and folded[:1] == " "):
            words = " ".join(folded.split())
            leading = " " if folded[:1] == " " and not after_space else ""
            after = " " if folded[-1] == " " and words else ""
            return leading + words + after
        return folded

    def walk(self, state: int, folded: str) -> int:
        """The state after `folded`; FOUND when a span ends in it. 0 is the state of the beginning."""
        if state == 0 and self._firsts.isdisjoint(folded):
            return 0
        following, fallback, ends = self._next, self._fallback, self._ends
        for char in folded:
            further = following[state].get(char)
            while further is None and state:
                state = fallback[state]
                further = following[state].get(char)
            state = further or 0
            if ends[state]:
                return FOUND
        return state

    def found_in(self, text: str) -> bool:
        """True if a whole text has a span in it."""
        return self.walk(0, self.fold(text, after_space=False)) == FOUND


def compiled(spans: Sequence[str]) -> HardList | None:
    """The compiled list of these spans; None if there are none."""
    return HardList(spans) if spans else None


def _folded(char: str) -> str:
    if char.isspace() or char == BRAILLE_BLANK:
        return " "
    if is_unseen(char):
        return ""
    folded = []
    for piece in unicodedata.normalize("NFKD", CONFUSABLES.get(ord(char), char)):
        if not is_unseen(piece):
            alike = CONFUSABLES.get(ord(piece), piece).casefold()
            folded.append(CONFUSABLES.get(ord(alike), alike) if len(alike) == 1 else alike)
    return "".join(" " if piece.isspace() else piece for piece in folded)
