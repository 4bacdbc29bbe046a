"""Characters that a reader does not see, for all who compare texts. Knows characters, not text."""

from __future__ import annotations

import unicodedata

BRAILLE_BLANK = "\u2800"
"""Shows as a space, though it is none by category."""
_BLANK = frozenset(
    "\u034f\u115f\u1160\u17b4\u17b5\u3164\uffa0\U0001d159"  # letters and signs that show nothing
    "\u0640\u07fa"  # a line within a word of Arabic or N'Ko, which makes it longer and no other
    "\u180b\u180c\u180d\u180f"  # selectors of variants
    "\u2065\ufff0\ufff1\ufff2\ufff3\ufff4\ufff5\ufff6\ufff7\ufff8"  # unassigned, and shown as nothing
)
_IGNORED = frozenset({"Cc", "Cf", "Cs"})
_MARKS = frozenset({"Mn", "Me"})


def is_invisible(char: str) -> bool:
    """True for what shows nothing: zero-width, bidi, tag and control characters, fillers, tatweel."""
    if char in _BLANK or "\ufe00" <= char <= "\ufe0f" or "\U000e0000" <= char <= "\U000e0fff":
        return True
    return unicodedata.category(char) in _IGNORED and not char.isspace()


def is_unseen(char: str) -> bool:
    """True for what is left out when texts are compared: the invisible, and marks over or under letters."""
    return is_invisible(char) or unicodedata.category(char) in _MARKS
