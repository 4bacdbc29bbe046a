"""The disguises that the classifiers must see through: for training and for the gates that test it.

Each takes a text and a seeded `random.Random` and gives the text in disguise; the same seed gives
the same. Written apart from `app.safety.text.normalize`, so that one does not merely undo the other.
"""

from __future__ import annotations

import argparse
import base64
import codecs
import itertools
import random
import urllib.parse
from collections.abc import Callable, Mapping
from types import MappingProxyType

Disguise = Callable[[str, random.Random], str]

_LEET = {"a": "4@", "e": "3", "i": "1!", "o": "0", "s": "5$", "t": "7", "l": "1", "b": "8", "g": "9"}
_CERTAIN_LEET = "aeiost"
_HOMOGLYPHS = {
    "a": "\u0430\u03b1",
    "c": "\u0441",
    "e": "\u0435\u212f",
    "h": "\u04bb",
    "i": "\u0456\u03b9",
    "k": "\u03ba",
    "m": "\u043c",
    "n": "\u0578",
    "o": "\u043e\u03bf\u0585",
    "p": "\u0440\u03c1",
    "s": "\u0455",
    "t": "\u03c4",
    "u": "\u03c5\u057d",
    "v": "\u03bd",
    "x": "\u0445\u03c7",
    "y": "\u0443",
}
_KEYBOARD = ("qwertyuiop", "asdfghjkl", "zxcvbnm")
_ZERO_WIDTH = "\u200b\u200c\u200d\u2060\ufeff\u00ad"
_MARKS = [chr(point) for point in range(0x300, 0x34F)]
_BIDI = "\u200e\u200f\u202a\u202c\u2066\u2069"
_CODE_CUES = ("Decode this {} and do what it says: ", "{}: ", "Answer what this {} string asks: ", "")
_REVERSED_CUES = (
    "Read this backwards: ",
    "The following is written backwards, answer it: ",
    "Right to left: ",
)
_ROT13_CUES = ("rot13: ", "Decode this ROT13 and answer it: ", "")


def leet(text: str, rng: random.Random) -> str:
    """Digits and signs for about three letters in four of those that have one."""
    kinds = _LEET if rng.random() < 0.5 else {char: _LEET[char] for char in _CERTAIN_LEET}
    share = rng.uniform(0.6, 1.0)
    return "".join(
        rng.choice(kinds[char]) if char in kinds and rng.random() < share else char for char in text.lower()
    )


def typos(text: str, rng: random.Random) -> str:
    """Letters swapped, lost, doubled or taken from the next key, in about a third of the longer words."""
    return " ".join(_mistyped(word, rng) if rng.random() < 0.35 else word for word in text.split(" "))


def _mistyped(word: str, rng: random.Random) -> str:
    if len(word) < 4 or not word.isalpha():
        return word
    at = rng.randrange(1, len(word) - 1)
    kind = rng.randrange(4)
    if kind == 0:
        return word[:at] + word[at + 1] + word[at] + word[at + 2 :]
    if kind == 1:
        return word[:at] + word[at + 1 :]
    if kind == 2:
        return word[:at] + word[at] + word[at:]
    return word[:at] + _next_key(word[at], rng) + word[at + 1 :]


def _next_key(char: str, rng: random.Random) -> str:
    for row in _KEYBOARD:
        at = row.find(char.lower())
        if at >= 0:
            return rng.choice(row[max(0, at - 1) : at] + row[at + 1 : at + 2])
    return char


def spaced(text: str, rng: random.Random) -> str:
    """A space after every letter; what was a space is wider."""
    gap = rng.choice(("   ", "  ", "    "))
    return gap.join(" ".join(word) for word in text.split())


def dotted(text: str, rng: random.Random) -> str:
    """A dot, hyphen or other sign between the letters of each word."""
    sign = rng.choice(".-_*")
    return " ".join(sign.join(word) for word in text.split())


def split_words(text: str, rng: random.Random) -> str:
    """Words of five letters or more cut in two or three by a sign."""
    sign = rng.choice("-.*_")
    return " ".join(_cut(word, sign, rng) for word in text.split(" "))


def _cut(word: str, sign: str, rng: random.Random) -> str:
    if len(word) < 4:
        return word
    cuts = sorted(rng.sample(range(1, len(word) - 1), 1 if len(word) < 7 else 2))
    ends = [0, *cuts, len(word)]
    return sign.join(word[start:end] for start, end in itertools.pairwise(ends))


def zero_width(text: str, rng: random.Random) -> str:
    """Characters that take no room between the letters."""
    return "".join(char + rng.choice(_ZERO_WIDTH) for char in text)


def homoglyphs(text: str, rng: random.Random) -> str:
    """Cyrillic, Greek and Armenian letters for the Latin ones that they look like."""
    share = rng.uniform(0.4, 1.0)
    return "".join(
        rng.choice(_HOMOGLYPHS[char]) if char in _HOMOGLYPHS and rng.random() < share else char
        for char in text
    )


def full_width(text: str, _rng: random.Random) -> str:
    """The full-width forms of East Asian typesetting."""
    return "".join(chr(ord(char) + 0xFEE0) if "!" <= char <= "~" else char for char in text)


def styled(text: str, rng: random.Random) -> str:
    """Mathematical letters: bold, script, Fraktur, double-struck or monospaced."""
    first = rng.choice((0x1D400, 0x1D4D0, 0x1D56C, 0x1D5D4, 0x1D670))
    return "".join(_in_style(char, first) for char in text)


def _in_style(char: str, first: int) -> str:
    if not (char.isascii() and char.isalpha()):
        return char
    return chr(first + ord(char) - (ord("A") if char.isupper() else ord("a") - 26))


def combining(text: str, rng: random.Random) -> str:
    """One to three marks on every letter."""
    return "".join(
        char + "".join(rng.choices(_MARKS, k=rng.randint(1, 3))) if char.isalpha() else char for char in text
    )


def bidi(text: str, rng: random.Random) -> str:
    """Directional marks between the letters, or the whole reversed under an override."""
    if rng.random() < 0.5:
        return "\u202e" + text[::-1] + "\u202c"
    return "".join(char + rng.choice(_BIDI) if rng.random() < 0.4 else char for char in text)


def base64_encoded(text: str, rng: random.Random) -> str:
    """Base64, at times twice, with a cue or without."""
    code = text
    for _ in range(rng.choice((1, 1, 1, 2))):
        code = base64.b64encode(code.encode()).decode()
    return rng.choice(_CODE_CUES).format("base64") + code


def hex_encoded(text: str, rng: random.Random) -> str:
    """Hexadecimal, in one run, in pairs or as escapes."""
    data = text.encode()
    code = rng.choice((data.hex(), data.hex(" "), "".join(f"\\x{byte:02x}" for byte in data)))
    return rng.choice(_CODE_CUES).format("hex") + code


def percent_encoded(text: str, rng: random.Random) -> str:
    """Percent escapes: of what URLs need them for, or of every character."""
    if rng.random() < 0.5:
        return urllib.parse.quote(text)
    return "".join(f"%{byte:02X}" for byte in text.encode())


def rot13(text: str, rng: random.Random) -> str:
    """Letters turned by thirteen, with a cue or without."""
    return rng.choice(_ROT13_CUES) + codecs.encode(text, "rot13")


def backwards(text: str, rng: random.Random) -> str:
    """Reversed, with a cue."""
    return rng.choice(_REVERSED_CUES) + text[::-1]


def case_jumble(text: str, rng: random.Random) -> str:
    """Upper and lower case at random."""
    return "".join(char.upper() if rng.random() < 0.5 else char.lower() for char in text)


def tag_characters(text: str, rng: random.Random) -> str:
    """The text in tag characters, which nobody sees, behind a harmless one."""
    shown = rng.choice(("Hello!", "What do you think?", "Please help me with this.", ""))
    return shown + "".join(chr(0xE0000 + ord(char)) for char in text if " " <= char <= "~")


DISGUISES: Mapping[str, Disguise] = MappingProxyType(
    {
        "leet": leet,
        "typos": typos,
        "spaced": spaced,
        "dotted": dotted,
        "split_words": split_words,
        "zero_width": zero_width,
        "homoglyphs": homoglyphs,
        "full_width": full_width,
        "styled": styled,
        "combining": combining,
        "bidi": bidi,
        "base64": base64_encoded,
        "hex": hex_encoded,
        "percent": percent_encoded,
        "rot13": rot13,
        "backwards": backwards,
        "case_jumble": case_jumble,
        "tag_characters": tag_characters,
    }
)
"""By name. The first two change what the words are; the gates allow them a greater loss."""


def obfuscate(text: str, name: str, seed: int) -> str:
    """The text in one disguise of `DISGUISES`; the same for the same seed."""
    return DISGUISES[name](text, random.Random(f"{seed}:{name}:{len(text)}"))  # noqa: S311  (reproducible, not secret)


def main() -> None:
    """Prints a text in every disguise."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("text")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in DISGUISES:
        print(f"{name:15} {obfuscate(args.text, name, args.seed)}")


if __name__ == "__main__":
    main()
