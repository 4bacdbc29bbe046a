"""The fewest tokens that a text can be, from its length and from what one token of a vocabulary can cover.

A tokenizer cuts a text into tokens and loses nothing of it. So a measure that cutting cannot lower is, for
the text, at most the sum over its tokens, and the text has at least

    measure(text) / the largest measure of any token

tokens. Two measures are taken, and the larger bound counts:

| measure | why cutting cannot lower it | where it is the better |
|---|---|---|
| bytes | the tokens have the text's bytes together | runs of a character |
| changes: bytes unlike the byte before | the first byte of each token counts as a change | words |

Runs of a character have the longest tokens of a vocabulary, 128 spaces, and hardly any changes; the longest
words have some 40 bytes.

What a tokenizer does before it cuts is taken into account, or there is no bound:

- A normalizer may shrink a text, so the text is measured as the normalizer leaves it. Here it is normalized
  in slices, by a tokenizer between special tokens: characters may compose across the seams of the one and not
  of the other. `SEAM_BYTES` is allowed for each seam.
- White space that may be dropped (stripped, collapsed, swallowed by a special token) is left out. Leaving
  bytes out of a text raises neither measure.
- A character that the vocabulary lacks must become a token per byte. Where unknown characters become a single
  token, however many they are, there is no bound.
- A tokenizer with a step that is not known here has no bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

SEAM_BYTES = 16
"""Bytes that a seam can save, rounded up: composing (three Hangul letters: 6), a mark in front (3)."""
SLICE_CHARS = 32 * 1024
"""Measured at a time: a normalizer keeps Python's lock for 2 ms over so much."""

_UNICODE_FORMS = frozenset({"NFC", "NFD", "NFKC", "NFKD"})
_PIECEWISE = _UNICODE_FORMS | {"Lowercase", "Prepend", "Precompiled", "StripAccents", "Nmt"}
"""Normalizers that treat a text as its parts, but for the seams."""
_COLLAPSES_SPACES = frozenset({" {2,}", r"\s+"})
_ONLY_CUTS = frozenset({"ByteLevel", "Digits", "Metaspace", "UnicodeScripts", "FixedLength"})
_DROPS_SPACES = frozenset({"Whitespace", "WhitespaceSplit"})
_META_SPACE = "\u2581"
_ASCII_SPACES = b" \t\n\r\x0b\x0c"


@dataclass(frozen=True, slots=True)
class TokenBound:
    """The bound of one tokenizer. The maxima are of any token, in bytes; without any, nothing is refused."""

    max_bytes: int = 0
    max_changes: int = 0
    counts_spaces: bool = True
    meta_spaces: bool = False
    normalize: Callable[[str], str] | None = None
    keeps_ascii: bool = True
    """True if normalizing leaves ASCII text as it is."""
    slice_chars: int = SLICE_CHARS

    def over(self, text: str, tokens: int) -> int:
        """The fewest tokens that `text` is seen to have as soon as these are more than `tokens`, else 0."""
        if not self.max_bytes or len(text) <= tokens:  # no token is less than a character or its byte
            return 0
        total_bytes = changes = 0
        for start in range(0, len(text), self.slice_chars):
            slice_bytes, slice_changes = self._measures(text[start : start + self.slice_chars])
            total_bytes += slice_bytes
            changes += slice_changes
            least = max(-(-total_bytes // self.max_bytes), -(-changes // self.max_changes))
            if least > tokens:
                return least
        return 0

    def _measures(self, text: str) -> tuple[int, int]:
        seam = 0
        if self.normalize is not None and not (self.keeps_ascii and text.isascii()):
            text, seam = self.normalize(text), SEAM_BYTES
        if self.meta_spaces:
            text = text.replace(_META_SPACE, " ")
        if not self.counts_spaces:
            text = "".join(text.split())
        size, changes = measures(text.encode("utf-8", "replace"))
        return max(size - seam, 0), max(changes - seam, 0)


def measures(data: bytes) -> tuple[int, int]:
    """Bytes, and how many of them differ from the byte before them."""
    values = np.frombuffer(data, np.uint8)
    return len(values), int(np.count_nonzero(values[1:] != values[:-1]))


def token_bound(tokenizer_json: str, normalize: Callable[[str], str] | None) -> TokenBound:
    """The bound of a tokenizer of the `tokenizers` library, from its JSON; none where none is proved."""
    tokenizer = orjson.loads(tokenizer_json)
    normalizers = list(_steps(tokenizer.get("normalizer"), "normalizers"))
    cuts = list(_steps(tokenizer.get("pre_tokenizer"), "pretokenizers"))
    model = tokenizer["model"]
    byte_level = any(step["type"] == "ByteLevel" for step in cuts)
    if not (
        all(map(_normalizes_piecewise, normalizers))
        and all(map(_only_cuts, cuts))
        and _covers_all_bytes(model, byte_level=byte_level)
    ):
        return TokenBound()
    added = tokenizer.get("added_tokens", ())
    counts_spaces = (
        all(step["type"] in _PIECEWISE or _replaced_character(step) for step in normalizers)
        and not any(step["type"] in _DROPS_SPACES for step in cuts)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    max_bytes = max_changes = 0
    for data, seam in _tokens(model, added, normalize if normalizers else None, byte_level=byte_level):
        size, changes = measures(data if counts_spaces else data.translate(None, _ASCII_SPACES))
        max_bytes = max(max_bytes, size + seam)
        max_changes = max(max_changes, 1 + changes + seam)
    return TokenBound(
        max_bytes,
        max_changes,
        counts_spaces,
        meta_spaces=not byte_level,
        normalize=normalize if normalizers else None,
        keeps_ascii=all(step["type"] in _UNICODE_FORMS for step in normalizers),
    )


def _steps(step: Mapping[str, Any] | None, parts: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for inner in step[parts]:
        yield from _steps(inner, parts)


def _normalizes_piecewise(step: Mapping[str, Any]) -> bool:
    if step["type"] == "Replace":
        return _replaced_character(step) or step["pattern"].get("Regex") in _COLLAPSES_SPACES
    return step["type"] in _PIECEWISE or step["type"] == "Strip"


def _replaced_character(step: Mapping[str, Any]) -> bool:
    """A replacement of a single character cannot reach across a seam."""
    return step["type"] == "Replace" and len(step["pattern"].get("String", "")) == 1


def _only_cuts(step: Mapping[str, Any]) -> bool:
    if step["type"] in {"Split", "Punctuation"}:
        return step["behavior"] != "Removed"
    return step["type"] in _ONLY_CUTS or step["type"] in _DROPS_SPACES


def _covers_all_bytes(model: Mapping[str, Any], *, byte_level: bool) -> bool:
    """True if no text is unknown to the vocabulary, so that all of it becomes tokens."""
    if model["type"] not in {"BPE", "Unigram"}:
        return False
    vocabulary = set(_tokens_of(model))
    if byte_level:
        return vocabulary >= _bytes_of_characters().keys()
    return bool(model.get("byte_fallback")) and all(f"<0x{value:02X}>" in vocabulary for value in range(256))


def _tokens_of(model: Mapping[str, Any]) -> Iterator[str]:
    if model["type"] == "BPE":
        yield from model["vocab"]
    else:
        yield from (token for token, _score in model["vocab"])


def _tokens(
    model: Mapping[str, Any], added: Any, normalize: Callable[[str], str] | None, *, byte_level: bool
) -> Iterator[tuple[bytes, int]]:
    """The bytes that each token covers at most, and those that its seams add."""
    characters = _bytes_of_characters() if byte_level else {_META_SPACE: b" "}
    for token in _tokens_of(model):
        yield b"".join(characters.get(character) or character.encode() for character in token), 0
    for token in added:
        content: str = token["content"]
        if normalize is None:
            yield content.encode(), 0
        else:
            yield content.encode(), 2 * SEAM_BYTES
            yield normalize(content).encode(), 2 * SEAM_BYTES


def _bytes_of_characters() -> dict[str, bytes]:
    """GPT-2's alphabet: the printable character of each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [value for value in range(256) if value not in printable]
    shown = {chr(value): bytes([value]) for value in printable}
    return shown | {chr(256 + number): bytes([value]) for number, value in enumerate(others)}
