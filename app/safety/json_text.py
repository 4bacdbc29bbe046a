r"""What a piece of JSON says to its reader: escapes undone, wherever a piece ends.

A tool's arguments come as JSON, and `\u0063anary` in them is read as `canary`. Linear; an escape
that is none stays as it is.
"""

from __future__ import annotations

_SHORT = {"n": "\n", "t": "\t", "r": "\r", "b": " ", "f": " "}


def unescaped(text: str) -> tuple[str, str]:
    """The text with its escapes undone, and an escape at its end that goes on in the next piece."""
    if "\\" not in text:
        return text, ""
    first, *rest = text.split("\\")
    said = [first]
    at, last = 0, len(rest) - 1
    while at <= last:
        part = rest[at]
        if part[:1] == "u":
            digits = part[1:5]
            if len(digits) < 4 and at == last:
                return "".join(said), "\\" + part
            said.append(_character(digits) + part[5:])
        elif part:
            said.append(_SHORT.get(part[0], part[0]) + part[1:])
        elif at < last:  # an escaped backslash: what comes after it is text
            at += 1
            said.append("\\" + rest[at])
        else:
            return "".join(said), "\\"
        at += 1
    return "".join(said), ""


def _character(digits: str) -> str:
    try:
        return chr(int(digits, 16))
    except ValueError:
        return digits
