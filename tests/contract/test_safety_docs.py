"""Pages on safety: the policy file is one, the table has every category, numbers are those of the code."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from app.safety import thresholds
from app.safety.categories import ALL, LOCKED
from app.safety.guard import tier
from app.safety.policies import allow
from app.safety.policies.policy_file import PolicyFile, Rule, parse
from app.safety.prompt import remembered
from app.safety.text import turns
from app.safety.thresholds import HOLDBACK, WATCHED_HOLDBACK

DOCS = Path(__file__).resolve().parents[2] / "docs"


def example() -> PolicyFile:
    """The policy file that docs/safety-policy.md shows."""
    page = (DOCS / "safety-policy.md").read_text("utf-8")
    [text] = re.findall(r"```toml\n(.*?)```", page, re.DOTALL)
    return parse(tomllib.loads(text))


def test_the_example_is_a_policy():
    """It is taken as it stands, and says what its comments say."""
    file = example()
    assert file.rules["S1"] == Rule()
    assert file.rules["S6"] == Rule("flag")
    assert file.rules["S11"] == Rule("block", 0.01, 0.1)
    assert file.alignment.version == "school-3"
    assert "{help_lines}" in file.messages["S11"]


def test_every_category_is_described():
    """By code, name and title, and those that are locked are said to be."""
    page = (DOCS / "safety.md").read_text("utf-8")
    for category in ALL:
        locked = "; **cannot be loosened**" if category.code in LOCKED else ""
        assert f"| `{category.code}` | `{category.name}` | {category.title}{locked} |" in page


NUMBERS = (
    (
        "inside/screens",
        f"{HOLDBACK.base} tokens: a token goes out as soon as it is read | up to {HOLDBACK.max} tokens |",
    ),
    (
        "inside/screens",
        f"{WATCHED_HOLDBACK.base} tokens, from the first one on | up to {WATCHED_HOLDBACK.max} tokens |",
    ),
    (
        "inside/screens",
        f"Doubt begins at {thresholds.SUSPICION_RATIO} of the score at which an answer is examined.",
    ),
    ("inside/screens", f"the message's last {thresholds.CONTINUED_CHARS:,} characters"),
    ("safety", f"plus one second for every {thresholds.ENCODER_CHARS_PER_S:,} characters"),
    ("safety", f"read in slices of {turns.SLICE_CHARS:,} characters"),
    ("inside/screens", f"up to {turns.SHORT_CHARS} characters"),
    ("inside/screens", f"its score times {turns.DECAY} for each turn since"),
    ("inside/screens", f"it remembers {remembered.JUDGED:,} texts"),
    ("inside/screens", f"it reads the {thresholds.ENCODED_TEXTS} texts that the n-grams doubt most"),
    ("safety-policy", f"a phrase of {allow.MIN_PHRASE_CHARS} to {allow.MAX_PHRASE_CHARS} characters"),
    ("safety-policy", f"A file has at most {allow.MAX_ENTRIES} entries."),
    ("inside/screens", f"the newest {turns.EDITED_CHARS:,} characters"),
    ("inside/screens", f"the message has at most {allow.MAX_TURN_CHARS:,} characters"),
    ("safety-policy", f"{thresholds.GUARD_BLOCK} blocks, {thresholds.GUARD_WATCH} watches"),
    ("safety-policy", f"Targets go from {thresholds.MIN_FPR} to {thresholds.MAX_FPR}."),
    ("guard", f"{thresholds.GUARD_BLOCK} blocks and {thresholds.GUARD_WATCH} watches"),
    ("guard", f"takes longer than {tier.TIMEOUT_S:g} s"),
)
"""Page and words."""


@pytest.mark.parametrize(("page", "words"), NUMBERS)
def test_numbers_are_those_of_the_code(page: str, words: str):
    """A number that the page gives is the constant's."""
    text = " ".join((DOCS / f"{page}.md").read_text("utf-8").split())
    assert words in text
