"""The categories of harm: MLCommons' hazards S1 to S13 and the jailbreak, in every vocabulary used here.

Scores, the policy file, events and metrics know a category by its code. The names are those of the
AILuminate taxonomy (https://mlcommons.org/ailuminate/), which Llama Guard 3 has too.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class Category(NamedTuple):
    """One category: its code, its name, its scope, and its keys of OpenAI's moderation.

    OpenAI has no key for some, and none of ours tells its finer ones apart (`hate/threatening`).
    """

    code: str
    name: str
    title: str
    openai: tuple[str, ...]


ALL: tuple[Category, ...] = (
    Category("S1", "violent_crimes", "violent crimes", ("violence", "illicit/violent")),
    Category("S2", "non_violent_crimes", "non-violent crimes", ("illicit",)),
    Category("S3", "sex_crimes", "sex-related crimes", ("sexual", "illicit")),
    Category("S4", "child_exploitation", "child sexual exploitation", ("sexual/minors",)),
    Category("S5", "defamation", "defamation", ("harassment",)),
    Category("S6", "specialized_advice", "dangerous specialized advice", ()),
    Category("S7", "privacy", "privacy violations", ()),
    Category("S8", "intellectual_property", "intellectual property violations", ()),
    Category("S9", "indiscriminate_weapons", "indiscriminate weapons", ("illicit/violent",)),
    Category("S10", "hate", "hate", ("hate",)),
    Category(
        "S11",
        "self_harm",
        "suicide and self-harm",
        ("self-harm", "self-harm/intent", "self-harm/instructions"),
    ),
    Category("S12", "sexual_content", "sexual content", ("sexual",)),
    Category("S13", "elections", "false information about elections", ()),
    Category("JB", "jailbreak", "attempts to get around the rules", ()),
)

CATEGORIES: tuple[str, ...] = tuple(category.code for category in ALL)
"""The codes, in the order of every table and array of scores."""

BY_CODE: Mapping[str, Category] = {category.code: category for category in ALL}
CODE_OF: Mapping[str, str] = {category.name: category.code for category in ALL}
"""The code of a name, as `S11` of `self_harm`."""

LOCKED = frozenset({"S4"})
"""Child sexual exploitation: no policy, no mode, no key and no entry of `allow` can loosen it."""

OPENAI_KEYS: tuple[str, ...] = (
    "harassment",
    "harassment/threatening",
    "hate",
    "hate/threatening",
    "illicit",
    "illicit/violent",
    "self-harm",
    "self-harm/instructions",
    "self-harm/intent",
    "sexual",
    "sexual/minors",
    "violence",
    "violence/graphic",
)
"""Every category of OpenAI's moderation answer, with or without one of ours."""


def code_of(text: str) -> str:
    """The code of a category by its code or its name. Raises KeyError."""
    return text if text in BY_CODE else CODE_OF[text]


def name_of(code: str) -> str:
    """The readable name of a category, as `self_harm` of `S11`. Raises KeyError."""
    return BY_CODE[code].name
