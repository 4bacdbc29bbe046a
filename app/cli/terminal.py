"""Text on a terminal: what a server or a model wrote, so that it cannot drive the terminal, and styles."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202d\u202e\ud800-\udfff]")
"""All but tab and newline: C0, DEL, C1, the two overrides of writing direction, and halves of a character."""


def printable(text: str) -> str:
    """The text without characters that move the cursor, change its look, or reverse how it reads."""
    return _CONTROLS.sub("", text)


def has_style(stream: TextIO | None = None) -> bool:
    """Whether the stream is a terminal whose user wants colours: NO_COLOR unset or empty."""
    return (
        (stream or sys.stdout).isatty()
        and not os.environ.get("NO_COLOR")
        and os.environ.get("TERM") != "dumb"
    )
