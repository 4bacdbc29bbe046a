r"""A chunk of text with its escapes decoded as a client decodes them, wherever a chunk ends.

Decoded are the escapes of JSON and of programs (`\u0063`, `\x63`, `\n`, surrogate pairs) and the entities of
HTML (`&#99;`, `&shy;`), which Markdown renders; nested ones too. A run of backslashes counts as one, so
that JSON within JSON reads the same. Linear; an escape that is none stays as it is. Percent signs are left
alone: they are decoded in addresses, which are not shown.
"""

from __future__ import annotations

import html
import re

TRIGGERS = "\\&"
"""A text without any of these says what it is."""
_NESTED = 4
"""Escapes within escapes that are decoded; a client decodes two."""
_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": " ", "f": " "}
_RUN = re.compile(r"\\{2,}")
_WHOLE = re.compile(
    r"\\(?:u([0-9a-fA-F]{4})|u\{([0-9a-fA-F]{1,6})\}|U([0-9a-fA-F]{8})|x([0-9a-fA-F]{2})|([^uUx]))"
    r"|(&(?:#[0-9]{1,24};?|#[xX][0-9a-fA-F]{1,24};?|[A-Za-z][A-Za-z0-9]{0,30};))",
    re.DOTALL,
)
_UNFINISHED = re.compile(
    r"(?:\\(?:u(?:[0-9a-fA-F]{0,3}|\{[0-9a-fA-F]{0,6}|[dD][89abAB][0-9a-fA-F]{2}(?:\\(?:u[0-9a-fA-F]{0,3})?)?)"
    r"|U[0-9a-fA-F]{0,7}|x[0-9a-fA-F]?)?"
    r"|&(?:#(?:[xX][0-9a-fA-F]{0,24}|[0-9]{0,24})|[A-Za-z][A-Za-z0-9]{0,30})?)\Z"
)
_MAX_UNFINISHED_CHARS = 40


def unescape(text: str) -> tuple[str, str]:
    """The text with its escapes decoded, and an escape at its end that the next chunk completes."""
    pending = ""
    for _ in range(_NESTED):
        if "\\" in text:
            text = _RUN.sub(r"\\", text)
        ending = _UNFINISHED.search(text, max(0, len(text) - _MAX_UNFINISHED_CHARS))
        if ending is not None:
            text, pending = text[: ending.start()], ending[0] + pending
        further = _paired(_WHOLE.sub(_character, text))
        if further == text:
            break
        text = further
    return text, pending


def _character(escape: re.Match[str]) -> str:
    four, braced, eight, two, char, entity = escape.groups()
    if entity is not None:
        return html.unescape(entity)
    if char is not None:
        return _SHORT.get(char, char)
    code = int(four or braced or eight or two, 16)
    return chr(code) if code <= 0x10FFFF else ""


def _paired(text: str) -> str:
    """Surrogates that stand in pairs are the character that they mean."""
    if text.isascii():
        return text
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
