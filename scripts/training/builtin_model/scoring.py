"""Judges an answer by the names in it: commands, flags, routes, headers and settings.

An answer is right when it has a name of every group that the question asks for, and no other name. What looks
like a name and is none of the product's counts as a wrong one. Wording is not judged.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypedDict, cast

HERE = Path(__file__).parent
QUESTIONS = HERE / "questions.jsonl"
VOCABULARY = HERE / "vocabulary.json"

ROUTE_START = r"/(?:api|v1|healthz|readyz|metrics)\b"
QUOTES = "[`\"'*]*"

# Applied in this order. Each brings the many spellings of one name to the one that the vocabulary has.
NORMALISATIONS = (
    # The value of an option or an assignment may be a path, and is never a route: --data-dir /mnt/big
    (re.compile(r"""(--[\w-]+[ =]|\w ?= ?)["']?[~.]*/[^\s`"',;]*"""), r"\1PATH"),
    (re.compile(r"https?://[^\s/`\"')]+(?=/)"), ""),
    (re.compile(r"\b(?:localhost|[\d.]+)(?::\d+)?(?=/)"), ""),
    (re.compile(r"(?:\$\{?\w+\}?|\b[A-Z_]{3,})(?=/(?:api|v1)\b)"), ""),
    # Any stream or conversation id becomes {id}; a word that is a verb there is a route of its own.
    (
        re.compile(
            r"(/chat/completions/|/conversations/)(?!(?:cancel|stop|resume|restore|export|stream)\b)"
            r"(?:\{[^}\s]*\}|<[^>\s]*>|\$\{?\w+\}?|:\w+|\.{3}|…|[\w-]+)"
        ),
        r"\1{id}",
    ),
    (
        re.compile(
            rf"\b(POST|GET|PUT|DELETE|PATCH)\b{QUOTES}(?: (?:request|call|it))?(?: (?:to|on|of|at|for|from))?"
            rf"(?: the)?\s+{QUOTES}(?={ROUTE_START})"
        ),
        r"\1 ",
    ),
)

# What looks like a name of the product; what the vocabulary has is taken out of the text before.
LOOKALIKES = re.compile(
    r"""
      (?<![\w.~<}])/(?:api|v\d)(?:/[\w{}-]+)*   # a route
    | (?<![\w.~<}/])/[a-z][a-z_-]*(?![\w/])     # /health
    | (?<![\w-])--[a-z][\w-]*                   # a flag
    | \bscripts/[\w-]+
    | \bpython3?[ ]-m[ ]\w+(?:[ ]\w+)?
    | (?<=`)tokenring[ ]\w+
    | \b(?:TOKENRING|SGLANG|OPENAI)_[A-Z_]+
    | \b[Xx]-[A-Za-z][\w-]*
    | \b[A-Z][A-Za-z]+(?:-[A-Z][A-Za-z]*)+(?=[`:'"]|\ header)
    | \b[a-z]+(?:_[a-z0-9]+)+\b                 # a setting or a field
    | \b[\w-]+\.(?:toml|ya?ml|ini|conf|env)\b
    """,
    re.VERBOSE,
)

Kind = Literal[
    "command",
    "curl",
    "field",
    "file",
    "flag",
    "header",
    "key",
    "marker",
    "method",
    "route",
    "setting",
    "variable",
]


@dataclass(frozen=True, slots=True)
class Name:
    """One name of the product and its spellings; a `marked` one is an English word unless marked as code."""

    name: str
    kind: Kind
    forms: tuple[str, ...] = ()
    marked: bool = False
    harmless: bool = False

    def patterns(self) -> Iterable[tuple[int, str]]:
        """Give (length, regular expression) of each spelling."""
        for form in self.forms or (self.name,):
            yield len(form), self._pattern(form)

    def _pattern(self, form: str) -> str:
        text = re.escape(form)
        if self.marked:
            return _marked(text)
        if self.kind == "key":
            return rf"(?<![\w-]){text}(?= = [\"\d])"
        if self.kind == "header" and "-" in form:
            text = f"(?i:{text})"
        left = (
            r"(?<![\w/}-])(?<!POST )(?<!GET )(?<!PUT )(?<!DELETE )(?<!PATCH )"
            if form[0] == "/"
            else r"(?<![\w-])"
        )
        right = r"(?![\w{-])(?!/[\w{])" if form[-1].isalnum() or form[-1] == "}" else ""
        return left + text + right


class Question(TypedDict):
    """One question: each group of `right` needs one of its names; `allowed` names may appear too."""

    question: str
    right: list[list[str]]
    allowed: list[str]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What an answer has to show for itself: the groups it misses and the names it should not have."""

    missing: tuple[tuple[str, ...], ...]
    wrong: tuple[str, ...]

    @property
    def right(self) -> bool:
        """True when nothing is missing and nothing is wrong."""
        return not self.missing and not self.wrong


class Scorer:
    """Finds the names of a vocabulary in answers, the longest spelling first."""

    def __init__(self, names: Iterable[Name]) -> None:
        self.names = tuple(names)
        spellings = sorted(
            ((length, pattern, name) for name in self.names for length, pattern in name.patterns()),
            key=lambda spelling: -spelling[0],
        )
        self._owners = [name.name for _, _, name in spellings]
        self._scan = re.compile(
            "|".join(f"(?P<s{i}>{pattern})" for i, (_, pattern, _) in enumerate(spellings))
        )
        self._harmless = {name.name for name in self.names if name.harmless}

    @classmethod
    def of_product(cls) -> "Scorer":
        """Read the product's vocabulary."""
        entries = json.loads(VOCABULARY.read_text(encoding="utf-8"))
        return cls(Name(**{**entry, "forms": tuple(entry.get("forms", ()))}) for entry in entries)

    def mentions(self, answer: str) -> tuple[set[str], set[str]]:
        """Give the names an answer mentions: those of the vocabulary, and those that only look like one."""
        text = answer
        for pattern, replacement in NORMALISATIONS:
            text = pattern.sub(replacement, text)
        mentioned: set[str] = set()

        def take(match: re.Match[str]) -> str:
            mentioned.add(self._owners[int(cast("str", match.lastgroup)[1:])])
            return "\0"

        rest = self._scan.sub(take, text)
        return mentioned, {match.group().strip("`") for match in LOOKALIKES.finditer(rest)}

    def judge(self, question: Question, answer: str) -> Verdict:
        """Judge one answer to one question."""
        mentioned, unknown = self.mentions(answer)
        groups = [tuple(group) for group in question["right"]]
        welcome = {name for group in groups for name in group} | set(question["allowed"]) | self._harmless
        return Verdict(
            missing=tuple(group for group in groups if not mentioned.intersection(group)),
            wrong=tuple(sorted((mentioned - welcome) | unknown)),
        )


def read_questions(path: Path = QUESTIONS) -> list[Question]:
    """Read the questions, one JSON object a line."""
    return [cast("Question", json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]


def _marked(word: str) -> str:
    quoted = rf"(?<=[`\"']){word}(?=[`\"'])|(?<=`){word}(?=[:=])"
    valued = r" ?= ?[\w\"'\[]|: ?(?:true|false|\[|\d)| to `?(?:true\b|\d)| (?:field|parameter)\b"
    assigned = rf"(?<![\w-]){word}(?={valued})"
    return f"(?:{quoted}|{assigned})"
