"""Text disguised from classifiers: its signs, and the plain text.

Each finder first asks something cheap of the whole text (a substring of its character classes, its
longest word) and answers nothing for ordinary prose, code and addresses. Linear. `revealed` takes text
of any script as it was written; the others undo what is done to English, in text whose characters are
plain already (`app.safety.text.normalize`).
"""

from __future__ import annotations

import binascii
import contextlib
import html
import itertools
import operator
import re
import string
import urllib.parse
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from app.safety.text.invisible import BRAILLE_BLANK, is_invisible

MAX_ENCODED_CHARS = 8192
"""Of one text, how much is decoded."""
_MAX_NESTED = 2
_LONG_CHARS = 16
"""From this length on a word may be code without anything else saying so."""
_SHORT_CHARS = 8
_MAX_LEET_CHARS = 24

_SEPARATORS = "-._*/|+~,:;^=&"
_CUTS = "-._*~"
_OPENING = "\"'`([{<*"
_EDGES = "\"'`.,;:!?()[]{}<>*"
_LEET_DIGITS = "013457"
_LEET_SIGNS = "@$!|"


def _classes(kinds: Mapping[str, str]) -> bytes:
    """A table for `bytes.translate` that makes of text its character classes; '?' is everything else."""
    table = bytearray(b"?" * 256)
    for kind, chars in kinds.items():
        for char in chars:
            table[ord(char)] = ord(kind)
    return bytes(table)


_SPACES = " \t\n\r\f\v"
_CUT = _classes({"x": string.ascii_letters, ".": _CUTS, " ": _SPACES})
_LEET = _classes({"x": string.ascii_letters, "0": _LEET_DIGITS, "$": _LEET_SIGNS, " ": _SPACES})
_HEX_CLASSES = _classes({"h": string.hexdigits, " ": _SPACES})
_LETTERS = _classes({" ": _SPACES})
_LONG = b"?" * _LONG_CHARS
_PAIRS = b"hh hh hh hh hh"
_SINGLES = (b"x.x.x.x", b"x . x . x", b"x. x. x. x")
_SPACED = ((b"x x x x", b" x x x "), (b"x  x  x  x", b" x  x  x "))
"""Four letters in a row that spaces part, ends of words among them, and three that are words."""
_MIXED = (b"x0x", b"x00x", b"x$x", b"x0$x", b"x$$x")
_UNLEET = str.maketrans("013457@$!|89", "oieastasilbg")

_BASE64 = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/-_="
_HEX = b"0123456789abcdefABCDEF"
_ESCAPES = {"\\u": re.compile(r"\\u([0-9a-fA-F]{4})"), "\\x": re.compile(r"\\x([0-9a-fA-F]{2})")}
_URL_SAFE = bytes.maketrans(b"-_", b"+/")
_ENCODING_CUES = ("base64", "base 64", "decode", "encoded", "hex")
_ROT13_CUES = ("rot13", "rot-13", "rot 13", "caesar cipher", "caesar shift", "caesar-")
_ROT13_WORDS = frozenset(
    ["gur", "gb", "naq", "ubj", "jung", "sbe", "lbh", "znxr", "jvgu", "gung", "guvf", "pna", "juvpu", "jul"]
)
_BACKWARDS_CUES = (
    "read backward",
    "backwards:",
    "spelled backward",
    "written backward",
    "right to left",
    "right-to-left",
)
_REVERSED_WORDS = frozenset(
    (
        *("eht", "ot", "dna", "woh", "rof", "htiw", "taht", "siht", "ekam", "tahw", "hcihw", "uoy", "dluohs"),
        *("tuoba", "morf", "fo", "eb", "nac", "tuo", "lla", "ruoy", "yna", "rieht", "meht", "ohw", "dluow"),
        *("tuohtiw", "gnisu", "gnikam", "erehw", "nehw", "yhw", "teg", "evig", "etirw", "dliub", "ym"),
    )
)

_JOINERS = "\u200c\u200d\u200e\u200f"
"""Invisible characters that words of some languages have in them."""
_JOINER_EVERY = 5
"""One joiner in so many characters is no spelling."""
_INSIDE = re.compile(r"\0(?<=[^\W\d_]\0)\0*(?=[^\W\d_])")
_LAST_LATIN = "\u024f"
_MARK = r"[^\x00-\u02ff\u2000-\u2e7f\u3000-\u303f\u30fb\ufe10-\uffef\U0001f000-\U0001ffff\w\s]"
_LETTER = rf"[^\x00-\u024f\u1e00-\u1eff\W\d_](?<![^\W_].)(?<!{_MARK}.){_MARK}*+(?![^\W_])"
_GAP = r"[\s_\-.,·・•*/|~+=]"
_APART = re.compile(rf"{_LETTER}(?P<gap>{_GAP}{{1,3}}){_LETTER}(?:(?:(?P=gap)|{_GAP}{{2,6}}){_LETTER})+")
"""Three letters or more in a row, not Latin ones, that stand by themselves with the same between them."""
_GAPS = re.compile(rf"{_GAP}+")
_LINKS = "_/|+=,*.~-"
_LINKED = re.compile(rf"(?<![^\s\d{_LINKS}])[^\s\d{_LINKS}]++(?:[{_LINKS}]{{1,3}}+[^\s\d{_LINKS}]++){{3,}}")
"""Four words or more that signs join."""
_SHORTEST_LINKED = 7
_LINKED_SHARE = 3
"""One in so many characters of a text is in such words, or the text is ordinary."""
_UNLINKED = str.maketrans(dict.fromkeys(_LINKS, " "))


def revealed(text: str) -> str | None:
    """The text without what disguises words of any script, in lower case, marks as they are; None if nothing.

    Invisible characters are out, letters that stand apart are joined, words that signs join are parted.
    """
    read = text
    if not text.isascii():
        kinds = {char for char in set(text) if char > "\x7f"}
        read = _without_invisible(text.replace(BRAILLE_BLANK, " "), kinds)
        if any(char > _LAST_LATIN and char.isalpha() for char in kinds):
            read = _APART.sub(_without_gaps, read)
    read = _parted(read)
    return None if read == text else " ".join(read.lower().split())


def respelled(shown: str) -> str | None:
    """The text with letters joined that were set apart and digits read as letters, if it has any."""
    classes = f" {shown} ".encode("ascii", "replace").translate(_CUT)
    read = shown
    cut = classes.count(b".") > 1
    if (cut and any(map(classes.__contains__, _SINGLES))) or any(
        words in classes and ends in classes for ends, words in _SPACED
    ):
        read = _joined(shown)
    elif cut and classes.count(b"x.x") > max(2, classes.count(b" ") // 3):  # "ex-plo-sives": a closer look
        read = _uncut(shown)
    mixed = _mixed(read)
    if mixed:
        every = mixed * 6 >= read.count(" ")
        read = " ".join(_unleet_word(word, numbers=every) for word in read.split())
    return None if read is shown or read.split() == shown.split() else read


def looks_rot13(plain: str, words: AbstractSet[str]) -> bool:
    """True if a normalized text, of these words, names rot13 or has its commonest words in it."""
    return any(map(plain.__contains__, _ROT13_CUES)) or len(_ROT13_WORDS & words) > 1


def looks_reversed(plain: str, words: AbstractSet[str]) -> bool:
    """True if a normalized text, of these words, speaks of reading backwards or has reversed common words."""
    if any(map(plain.__contains__, _BACKWARDS_CUES)):
        return True
    return len(_REVERSED_WORDS & words) > ("revers" not in plain)


def decoded(shown: str, plain: str) -> str | None:
    """The text with base64, hex, percent escapes and entities read, nested at most twice; None without any.

    `plain` is its normalized form, where cue words are looked for.
    """
    cued = any(map(plain.__contains__, _ENCODING_CUES))
    undisguised = None
    for _ in range(_MAX_NESTED):
        once = _decoded_once(shown, cued=cued)
        if once == shown:
            break
        shown = undisguised = once
    return undisguised


def _without_invisible(text: str, kinds: AbstractSet[str]) -> str:
    """The text without invisible ones of these characters, if words have more of them than spelling needs."""
    invisible = set(filter(is_invisible, kinds))
    if not invisible:
        return text
    marked = text.translate(dict.fromkeys(map(ord, invisible), "\0"))
    least = 1 if invisible.difference(_JOINERS) else len(text) // _JOINER_EVERY
    return marked.replace("\0", "") if len(_INSIDE.findall(marked)) >= max(least, 1) else text


def _without_gaps(run: re.Match[str]) -> str:
    """Letters that stand apart as words, wider gaps being between words; two and no more stay as they are."""
    if sum(gap == run["gap"] for gap in _GAPS.findall(run[0])) < 2:
        return run[0]
    return _GAPS.sub(lambda gap: "" if gap[0] == run["gap"] else " ", run[0])


def _parted(text: str) -> str:
    """The text with spaces for the signs that join words, if much of it is such words."""
    if sum(map(text.count, _LINKS)) * _LINKED_SHARE < text.count(" "):
        return text
    words = [word for word in text.split() if len(word) >= _SHORTEST_LINKED]
    if sum(map(len, words)) * _LINKED_SHARE < len(text):
        return text
    num_linked = sum(len(linked[0]) for word in words for linked in _LINKED.finditer(word))
    if num_linked * _LINKED_SHARE < len(text):
        return text
    return _LINKED.sub(lambda linked: linked[0].translate(_UNLINKED), text)


def _uncut(shown: str) -> str:
    """Words cut by signs made whole, if it is every third; hyphens and dots alone are common."""
    words = shown.split()
    whole = [_without_signs(word) for word in words]
    changed = sum(map(operator.ne, words, whole))
    return " ".join(whole) if changed * 3 >= len(words) and changed > 1 else shown


def _joined(shown: str) -> str:
    """Runs of single letters as words, where wider gaps are between words; words cut by signs whole."""
    out: list[str] = []
    run: list[str] = []
    for word in _in_a_line(shown).split(" "):
        if len(word.strip(_SEPARATORS)) > 1:
            out.extend(_closed(run))
            run.clear()
            whole = _without_signs(word)
            out.append(whole if len(word) + 1 >= 2 * len(whole) else word)
        else:
            run.append(word)
    out.extend(_closed(run))
    return " ".join(out)


def _in_a_line(shown: str) -> str:
    """The text with spaces for newlines: one between two lines of a letter each, else two."""
    lines = shown.split("\n")
    shorts = [len(line.strip()) < 2 for line in lines]
    gaps = (" " if short and next_short else "  " for short, next_short in itertools.pairwise(shorts))
    return "".join(map(operator.add, lines, itertools.chain(gaps, [""])))


def _closed(run: list[str]) -> Sequence[str]:
    """The words that a run of single letters makes, a gap being an empty string; of a short one, itself."""
    if sum(map(str.isalpha, "".join(run))) < 3:
        return run
    return "".join(letter.strip(_SEPARATORS) or letter or " " for letter in run).split()


def _without_signs(word: str) -> str:
    """A word cut by one sign, whole; any other as it is."""
    bare = word.strip(_EDGES + _SEPARATORS)
    for sign in _CUTS:
        if sign in bare:
            whole = bare.replace(sign, "")
            if len(bare) == 2 * len(whole) - 1 and not whole.isdigit():
                return whole
            return word.replace(bare, whole) if whole.isalpha() or _mixed(whole) else word
    return word


def _mixed(shown: str) -> int:
    """The number of digits and signs between letters; 0 if few: below eight and one word in twelve."""
    classes = shown.encode("ascii", "replace").translate(_LEET)
    if b"0" not in classes and b"$" not in classes:
        return 0
    num_mixed = sum(map(classes.count, _MIXED))
    return num_mixed if num_mixed > 7 or num_mixed * 12 >= classes.count(b" ") else 0


def _unleet_word(word: str, *, numbers: bool) -> str:
    """A word of letters and leet signs with letters for these; one of digits alone only if `numbers`."""
    bare = word.rstrip(_EDGES).lstrip(_OPENING)
    lettered = any(map(str.isalpha, bare))
    if bare.isalpha() or len(bare) > _MAX_LEET_CHARS or not (lettered or numbers):
        return word
    if ("@" in bare and "." in bare) or bare.startswith("0x"):
        return word
    return word.replace(bare, bare.replace("11", "ll").translate(_UNLEET)) if bare else word


def _decoded_once(shown: str, *, cued: bool) -> str:
    if shown.count("%") > 2:
        plus = " " not in shown
        shown = urllib.parse.unquote_plus(shown) if plus else urllib.parse.unquote(shown)
    if shown.count("&#") > 2:
        shown = html.unescape(shown)
    for mark, escape in _ESCAPES.items():
        if shown.count(mark) > 2:
            shown = escape.sub(lambda match: chr(int(match[1], 16)), shown)
    raw = shown.encode("ascii", "replace")
    short = cued or shown.endswith("=") or "== " in shown
    if short or _LONG in raw.translate(_LETTERS) or _PAIRS in raw.translate(_HEX_CLASSES):
        return _blocks_read(shown.split(), _SHORT_CHARS if short else _LONG_CHARS) or shown
    return shown


def _blocks_read(words: list[str], least: int) -> str | None:
    """The words with blocks of code among them read, or None if none could be."""
    out: list[str] = []
    left = MAX_ENCODED_CHARS
    changed = False
    for is_code, block in itertools.groupby(words, lambda word: _may_be_code(word, least)):
        run = list(block)
        text = _block_read(run, left) if is_code else None
        if text is None:
            out.extend(run)
            continue
        changed = True
        left -= sum(map(len, run))
        out.append(text)
    return " ".join(out) if changed else None


def _may_be_code(word: str, least: int) -> bool:
    bare = word.strip(_EDGES)
    alphabet = _BASE64 if len(bare) >= least else _HEX
    long_enough = len(bare) >= least or len(bare) in {2, 4}
    return long_enough and not bare.encode("ascii", "replace").translate(None, alphabet)


def _block_read(run: list[str], left: int) -> str | None:
    """The text of a run of words that may be code, decoded as a whole, or else word by word."""
    bare = [word.strip(_EDGES) for word in run]
    whole = _code_read("".join(bare)[:left])
    if whole is not None or len(bare) < 2:
        return whole
    apart = [
        _code_read(word[:left]) if len(word) >= _SHORT_CHARS else None
        for word in bare[: left // _SHORT_CHARS]
    ]
    if not any(apart):
        return None
    return " ".join(text or word for text, word in itertools.zip_longest(apart, run, fillvalue=""))


def _code_read(code: str) -> str | None:
    """The text of hexadecimal or base64 that is mostly letters, else None."""
    if len(code) < _SHORT_CHARS:
        return None
    raw = code.encode("ascii", "replace")
    hexadecimal = raw.removeprefix(b"0x")
    if len(hexadecimal) % 2 == 0 and not hexadecimal.translate(None, _HEX):
        text = _letters_of(binascii.unhexlify(hexadecimal))
        if text is not None:
            return text
    raw = raw.translate(_URL_SAFE, b"=")
    with contextlib.suppress(binascii.Error):
        return _letters_of(binascii.a2b_base64(raw + b"=" * (-len(raw) % 4)))
    return None


def _letters_of(data: bytes) -> str | None:
    """Bytes as text, if they are text and mostly letters."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    letters = sum(char.isalpha() or char == " " for char in text)
    return text if letters * 4 >= len(text) * 3 else None
