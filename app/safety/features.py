"""Hashed n-grams of normalized text: words 1-2 and characters 3-5, as 64-bit numbers.

The hash of a span is a polynomial in its code points modulo 2**64 (arrays of unsigned integers wrap), so that
the hashes of all spans of a text come from a few array operations. A model's table takes the upper bits of
the mixed hash.

    span       polynomial, base B, salted by kind     made for
    chars n    c[0]*B^(n-1) + ... + c[n-1]            each position of the text with spaces
    word       same, over the word's characters       each run of letters and digits
    pair       word[i] * P + word[i+1]                neighbours, whatever stands between them
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

CHARS: tuple[int, ...] = (3, 4, 5)
"""Lengths of the character n-grams."""

PIECE = 8192
"""Characters hashed at once; longer texts go in pieces, whose seams lose a few n-grams."""

_BASE = 0x9E3779B97F4A7C15
_PAIR = np.uint64(0xD6E8FEB86659FD93)
_MIX = np.uint64(0xFF51AFD7ED558CCD)
_SALT_CHARS = np.uint64(0x1B873593CC9E2D51)
_SALT_WORD = np.uint64(0x52DCE729A3F8B1C5)
_SALT_PAIR = np.uint64(0x38495AB5E6546B65)
_MODULUS = 1 << 64
_INVERSE = pow(_BASE, -1, _MODULUS)


def _powers(base: int, count: int) -> Hashes:
    steps = np.full(count, base, np.uint64)
    steps[0] = 1
    return np.multiply.accumulate(steps)


_UP = _powers(_BASE, PIECE + 1)
_DOWN = _powers(_INVERSE, PIECE + 1)
_B = np.uint64(_BASE)


def _ascii_words() -> NDArray[np.bool_]:
    table = np.zeros(128, np.bool_)
    table[[code for code in range(128) if chr(code).isalnum()]] = True
    return table


_WORDLIKE = _ascii_words()
_FIRST_BEYOND = 0xC0


def codes(text: str) -> Hashes:
    """The code points of a text."""
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)


def wordlike(points: Hashes) -> NDArray[np.bool_]:
    """Which code points belong to words: letters and digits, and all beyond ASCII but its punctuation."""
    inside: NDArray[np.bool_] = _WORDLIKE.take(points.view(np.int64), mode="clip")
    if points.max(initial=0) < _FIRST_BEYOND:
        return inside
    beyond = (points >= _FIRST_BEYOND) & ~((points >= 0x2000) & (points <= 0x206F)) & (points != 0x3000)
    result: NDArray[np.bool_] = inside | beyond
    return result


def mixed(salted: Hashes) -> Hashes:
    """Hashes whose upper bits depend on all of the span."""
    spread = salted * _MIX
    spread ^= spread >> np.uint64(32)
    spread *= _MIX
    return spread


def char_grams(points: Hashes) -> list[Hashes]:
    """For each n of CHARS the unmixed hashes of the n-grams, one for each start."""
    grams = []
    rolling = points + np.uint64(1)
    shifted = rolling
    for n in range(2, CHARS[-1] + 1):
        if len(rolling) < 2:
            break
        rolling = rolling[:-1] * _B + shifted[n - 1 :]
        if n in CHARS:
            grams.append(rolling)
    return grams


def words(points: Hashes) -> Hashes:
    """The unmixed hash of each word, of at most PIECE code points."""
    inside = np.zeros(len(points) + 2, np.bool_)
    inside[1:-1] = wordlike(points)
    edges = np.flatnonzero(inside[1:] != inside[:-1])
    starts, ends = edges[::2], edges[1::2]
    sums = np.zeros(len(points) + 1, np.uint64)
    np.cumsum((points + np.uint64(1)) * _DOWN[: len(points)], out=sums[1:])
    return (sums[ends] - sums[starts]) * _UP[starts]


def pairs(word_hashes: Hashes) -> Hashes:
    """The unmixed hash of each pair of neighbouring words."""
    return word_hashes[:-1] * _PAIR + word_hashes[1:]


def _piece(text: str) -> list[Hashes]:
    """The hashes of a text's n-grams, salted by kind and not mixed."""
    points = codes(text)
    found = words(points)
    grams = [gram ^ _SALT_CHARS for gram in char_grams(points)]
    return [found ^ _SALT_WORD, pairs(found) ^ _SALT_PAIR, *grams]


def hashed(text: str) -> Hashes:
    """The hashes of all n-grams of a normalized text, repeated as often as they occur."""
    text = f" {text} "
    parts: list[Hashes] = []
    for start in range(0, len(text), PIECE):
        parts.extend(_piece(text[start : start + PIECE]))
    return mixed(np.concatenate(parts))


def distinct(text: str, bits: int) -> NDArray[np.intp]:
    """The places of a text's n-grams in a table of 2**bits weights, each once, sorted."""
    places = (hashed(text) >> np.uint64(64 - bits)).astype(np.uint32)  # half as wide sorts twice as fast
    places.sort()
    keep = np.ones(len(places), np.bool_)
    np.not_equal(places[1:], places[:-1], out=keep[1:])
    return places[keep].astype(np.intp)
