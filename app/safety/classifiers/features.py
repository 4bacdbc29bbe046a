"""Hashed n-grams of normalized text: words 1-2 and characters 3-5, as 64-bit numbers.

The hash of a span is a polynomial in its code points modulo 2**64 (arrays of unsigned integers wrap), so that
the hashes of all spans of a text take a few array operations. A model's table takes the upper bits of
the mixed hash.

    span       polynomial, base B, salted by kind     made for
    chars n    c[0]*B^(n-1) + ... + c[n-1]            each position of the text with spaces
    word       c[0] + ... + c[n-1]*B^-(n-1)           each run of letters and digits
    pair       word[i] * P + word[i+1]                neighbours, whatever stands between them
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Hashes = NDArray[np.uint64]

CHARS: tuple[int, ...] = (3, 4, 5)
"""Lengths of the character n-grams."""

CHUNK_CHARS = 8192
"""Characters hashed at once; longer texts are cut into chunks, whose seams lose a few n-grams."""

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


_UP = _powers(_BASE, CHUNK_CHARS + 1)
_DOWN = _powers(_INVERSE, CHUNK_CHARS + 1)
_CHARS_UP = [(n, _UP * np.uint64(pow(_BASE, n - 1, _MODULUS))) for n in CHARS]
_PLUS_ONE = bytes((byte + 1) % 256 for byte in range(256))

_WORDLIKE = bytes(code < 128 and chr(code).isalnum() for code in range(256))
_FIRST_BEYOND = 0xC0


def wordlike(text: str) -> bytes:
    """For each code point, 1 or 0, whether it belongs to a word.

    Letters and digits do, and all beyond ASCII but its punctuation.
    """
    mask = text.encode("ascii", "replace").translate(_WORDLIKE)
    if text.isascii():
        return mask
    points = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32)
    beyond = (points >= _FIRST_BEYOND) & ~((points >= 0x2000) & (points <= 0x206F)) & (points != 0x3000)
    inside: NDArray[np.uint8] = np.frombuffer(mask, np.uint8) | beyond
    return inside.tobytes()


def mixed(salted: Hashes) -> Hashes:
    """Hashes whose upper bits depend on all of the span."""
    spread = salted * _MIX
    spread ^= spread >> np.uint64(32)
    spread *= _MIX
    return spread


def word_edges(text: str) -> NDArray[np.intp]:
    """The positions at which words begin and end, in turns."""
    inside = np.frombuffer(b"\0%b\0" % wordlike(text), np.bool_)
    edges: NDArray[np.intp] = (inside[1:] != inside[:-1]).nonzero()[0]
    return edges


def _sums(text: str) -> Hashes:
    """The polynomials of the text's beginnings, from none to all of it, in powers of 1/B.

    The span from i to j is their difference, times B^i: what is before it falls out.
    """
    if text.isascii():
        terms = np.frombuffer(text.encode().translate(_PLUS_ONE), np.uint8).astype(np.uint64)
    else:
        terms = np.frombuffer(text.encode("utf-32-le", "surrogatepass"), np.uint32).astype(np.uint64)
        terms += np.uint64(1)
    sums = np.empty(len(terms) + 1, np.uint64)
    sums[0] = 0
    terms *= _DOWN[: len(terms)]
    np.add.accumulate(terms, out=sums[1:])
    return sums


def _chunk(text: str) -> Hashes:
    """The hashes of a text's n-grams, salted by kind and not mixed: words, pairs, characters.

    Written in place, and by NumPy's own functions rather than those around them: for a short text it is the
    number of operations that costs, most of all where each request finds the caches cold.
    """
    sums, edges = _sums(text), word_edges(text)
    starts = edges[::2]
    num_words, num_pairs = len(starts), max(len(starts) - 1, 0)
    counts = [max(len(text) - n + 1, 0) for n in CHARS]
    hashes = np.empty(num_words + num_pairs + sum(counts), np.uint64)
    words, pairs = hashes[:num_words], hashes[num_words : num_words + num_pairs]
    chars = hashes[num_words + num_pairs :]
    at = sums.take(edges)
    np.subtract(at[1::2], at[::2], out=words)
    words *= _UP.take(starts)
    np.multiply(words[:-1], _PAIR, out=pairs)
    pairs += words[1:]
    pairs ^= _SALT_PAIR
    words ^= _SALT_WORD
    begin = 0
    for (n, up), count in zip(_CHARS_UP, counts, strict=True):
        grams = chars[begin : begin + count]
        np.subtract(sums[n : n + count], sums[:count], out=grams)
        grams *= up[:count]
        begin += count
    chars ^= _SALT_CHARS
    return hashes


def hashed(text: str) -> Hashes:
    """The hashes of all n-grams of a normalized text, repeated as often as they occur."""
    return _hashed(f" {text} ")


def _hashed(span: str) -> Hashes:
    if len(span) <= CHUNK_CHARS:
        return mixed(_chunk(span))
    return mixed(
        np.concatenate([_chunk(span[at : at + CHUNK_CHARS]) for at in range(0, len(span), CHUNK_CHARS)])
    )


def span_places(span: str, bits: int) -> NDArray[np.intp]:
    """The places of a span's own n-grams in a table of 2**bits weights: words, pairs, characters."""
    return (_hashed(span) >> np.uint64(64 - bits)).astype(np.intp)


def distinct(text: str, bits: int) -> NDArray[np.intp]:
    """The places of a text's n-grams in a table of 2**bits weights, each once, sorted."""
    places = (hashed(text) >> np.uint64(64 - bits)).astype(np.uint32)  # half as wide sorts twice as fast
    places.sort()
    keep = np.empty(len(places), np.bool_)
    keep[:1] = True
    np.not_equal(places[1:], places[:-1], out=keep[1:])
    return places[keep].astype(np.intp)
