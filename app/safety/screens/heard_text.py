"""What an examination reads of a growing answer: how it opens, and its end."""

from __future__ import annotations

import sys

from app.core import Channel

EXAMINED_CHARS = 600
"""Characters at the end of an answer that are examined: more than the encoder reads of most languages."""
OPENING_CHARS = 250
"""Characters at its beginning, which say whether it refuses."""


class HeardText:
    """The beginning and the end of a text that comes in pieces; reasoning is no part of its beginning."""

    __slots__ = ("_thought", "ending", "opening")

    def __init__(self) -> None:
        self.opening = ""
        self.ending = ""
        self._thought = 0
        """Characters to come that are reasoning."""

    def turn_to(self, channel: Channel, num_unheard: int) -> None:
        """What comes is of this channel, behind so many characters that were not heard yet.

        A model that doubts in its reasoning may comply in its answer.
        """
        self._thought = sys.maxsize if channel == "reasoning" else min(self._thought, num_unheard)

    def add(self, text: str) -> None:
        """Hear more of it."""
        if len(self.opening) < OPENING_CHARS:
            self.opening = (self.opening + text[self._thought :])[:OPENING_CHARS]
        self._thought = max(0, self._thought - len(text))
        self.ending = (self.ending + text)[-EXAMINED_CHARS:]
