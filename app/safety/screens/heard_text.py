"""What an examination reads of a growing answer: how it opens, and its end."""

from __future__ import annotations

EXAMINED_CHARS = 600
"""Characters at the end of an answer that are examined: more than the encoder reads of most languages."""
OPENING_CHARS = 250
"""Characters at its beginning, which say whether it refuses."""


class HeardText:
    """The beginning and the end of a text that comes in pieces."""

    __slots__ = ("ending", "opening")

    def __init__(self) -> None:
        self.opening = ""
        self.ending = ""

    def add(self, text: str) -> None:
        """Hear more of it."""
        if len(self.opening) < OPENING_CHARS:
            self.opening = (self.opening + text)[:OPENING_CHARS]
        self.ending = (self.ending + text)[-EXAMINED_CHARS:]
