"""The corpus grammar: text patterns with `[a|b]` alternatives and `{slot}` references, expanded at random.

A pattern is parsed once into a tree; expansion draws from the given `Random` only, so a seed fixes the text.
A backslash keeps the next character as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random

_TOKEN = re.compile(r"\\.|\{[a-z_0-9]+\}|[\[\]|]|[^\\\[\]|{}]+|[{}]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Slot:
    """A reference to a named list of patterns."""

    name: str


@dataclass(frozen=True, slots=True)
class Choice:
    """Alternatives, each a row of parts, drawn uniformly."""

    options: tuple[Pattern, ...]


Pattern = tuple["str | Slot | Choice", ...]
Lexicon = Mapping[str, tuple[Pattern, ...]]


def parse(text: str) -> Pattern:
    """The tree of one pattern; raises `ValueError` for unbalanced brackets."""
    tokens = _TOKEN.findall(text)
    options, position = _parse_options(tokens, 0, depth=0)
    if position != len(tokens) or len(options) != 1:
        raise ValueError(f"unbalanced or stray bracket in {text!r}")
    return options[0]


def _parse_options(tokens: list[str], position: int, depth: int) -> tuple[tuple[Pattern, ...], int]:
    options: list[Pattern] = []
    parts: list[str | Slot | Choice] = []
    while position < len(tokens):
        token = tokens[position]
        position += 1
        if token == "[":
            inner, position = _parse_options(tokens, position, depth + 1)
            parts.append(Choice(inner))
        elif token == "]":
            if depth == 0:
                raise ValueError("closing bracket without an opening one")
            return (*options, tuple(parts)), position
        elif token == "|" and depth > 0:
            options.append(tuple(parts))
            parts = []
        elif len(token) > 2 and token[0] == "{":
            parts.append(Slot(token[1:-1]))
        else:
            parts.append(token[1:] if token[0] == "\\" else token)
    if depth > 0:
        raise ValueError("opening bracket without a closing one")
    return (*options, tuple(parts)), position


def expand(pattern: Pattern, lexicon: Lexicon, rng: Random) -> str:
    """One random text of the pattern, its spaces tidied by the caller."""
    out: list[str] = []
    for element in pattern:
        if isinstance(element, str):
            out.append(element)
        elif isinstance(element, Slot):
            out.append(expand(rng.choice(lexicon[element.name]), lexicon, rng))
        else:
            out.append(expand(rng.choice(element.options), lexicon, rng))
    return "".join(out)


def slots_of(pattern: Pattern) -> set[str]:
    """Every slot name that the pattern refers to, nested ones included."""
    names: set[str] = set()
    for element in pattern:
        if isinstance(element, Slot):
            names.add(element.name)
        elif isinstance(element, Choice):
            for option in element.options:
                names |= slots_of(option)
    return names
