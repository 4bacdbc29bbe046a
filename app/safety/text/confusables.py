"""Characters that look like Latin letters or ASCII signs and survive NFKD: what they are folded to.

An own, compact selection in the sense of Unicode TS 39, of what keyboards, "fancy text" pages and
homoglyph tools offer: Cyrillic, Greek, Coptic, Armenian, Cherokee, Lisu, phonetic letters, letters
with strokes, small capitals, turned letters, enclosed letters. Upper and lower case apart, since
they often look like different letters (a Greek capital H is eta). Knows characters, not text.
"""

# ruff: noqa: RUF001  (look-alikes are what this file is about)

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType

_ALIKE: Mapping[str, str] = MappingProxyType(
    {
        "a": "аАαΑⲁᎪꓮᴀɑɐⱥȺ",
        "b": "ᲀвВьЬβΒƀɃɓƁƂƃᏴꓐʙҍ",
        "c": "ᲃсСƈƇȼȻᏟꓚᴄɔƆↄⲥҫҪ",
        "d": "ԁԀđĐɖɗƉƊƌᎠꓓᴅÐðժ",
        "e": "еЕεΕҽɛƐəƏǝɘєЄꓰᎬᴇⲉɇɜҿ",
        "f": "ƒƑғҒꓝꜰϝẝ",
        "g": "ɡǥǤɠƓᏀꓖɢցԍ",
        "h": "һҺНнΗηհħĦɦɥᎻꓧʜⲏԋђћ",
        "i": "іІιΙıɩɪɨƗⲓᎥꓲᴉӏӀ",
        "j": "јЈϳͿɉɈᎫꓙᴊʝ",
        "k": "кКκΚƙƘᏦꓗᴋʞқҚⲕ",
        "l": "łŁʟɭɫɬƚᏞꓡⳑլԼ",
        "m": "мМΜᎷꓟᴍɱɯⲙ",
        "n": "пПΝɲƝɳŋŊƞոᏁꓠɴⲛ",
        "o": "ᲂоОοΟσςøØօՕɵƟᎾꓳᴏⲟөӨ",
        "p": "рРρΡƥƤᴘᏢꓑⲣþÞ",
        "q": "ԛԚʠզϙ",
        "r": "гГɍɌɾɽʀɹᎡꓣᴦⲅ",
        "s": "ѕЅƨꜱՏᏚꓢʂ",
        "t": "ᲅᲄтТτΤŧŦƭƬʈƮᴛʇᎢꓔⲧ",
        "u": "υսՍʉɄᴜꓴцʋ",
        "v": "νѵѴᴠʌᏙꓦ",
        "w": "ԝԜωᴡʍᎳꓪⲱɰ",
        "x": "хХχΧҳҲⲭꓫᕁ",
        "y": "уУүҮұҰγΥɏɎʏʎყꓬⲩ",
        "z": "ƶƵʐᴢᏃꓜΖʑȥ",
        "'": "‘’‛ʼʹˈ′",
        '"': "“”„‟«»",
        "-": "‐‒–—―−⁃˗",
        "/": "⁄∕╱",
        ".": "。·•∙⋅",
        "*": "∗⁎",
    }
)
"""By what they are folded to."""

_ENCLOSED: tuple[int, ...] = (0x1F150, 0x1F170, 0x1F1E6)
"""First of 26: negative circled, negative squared, and regional indicator letters."""


def _chosen() -> Iterator[tuple[int, str]]:
    for plain, alike in _ALIKE.items():
        for char in alike:
            yield ord(char), plain
    for first in _ENCLOSED:
        for at in range(26):
            yield first + at, chr(ord("a") + at)
    yield from ((ord("æ"), "ae"), (ord("Æ"), "ae"), (ord("œ"), "oe"), (ord("Œ"), "oe"), (ord("ẞ"), "ss"))


def _both_cases() -> dict[int, str]:
    """The table, closed under case: where one case is folded, so is the other."""
    table = dict(_chosen())
    for char, plain in [(chr(point), plain) for point, plain in table.items()]:
        for other in (char.casefold(), char.upper(), char.lower()):
            if len(other) == 1 and not other.isascii():
                table.setdefault(ord(other), plain)
    return table


CONFUSABLES: Mapping[int, str] = MappingProxyType(_both_cases())
"""Code point to ASCII, for `str.translate`."""

PARENTHESIZED: Mapping[int, str] = MappingProxyType(
    {first + at: chr(ord("a") + at) for first in (0x249C, 0x1F110) for at in range(26)}
)
"""Letters that NFKD would make three characters of, "(a)"."""
