"""docs/safety.md: its policy file is one, its table has every category, its numbers are those of the code."""

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

TEXT = (Path(__file__).resolve().parents[2] / "docs/safety.md").read_text("utf-8")


def example() -> PolicyFile:
    """The policy file that the document shows."""
    [text] = re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL)
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
    for category in ALL:
        locked = "; **cannot be loosened**" if category.code in LOCKED else ""
        assert f"| `{category.code}` | `{category.name}` | {category.title}{locked} |" in TEXT


NUMBERS = (
    (
        "safety",
        f"{HOLDBACK.base} tokens: a token goes out as soon as it is read | up to {HOLDBACK.max} tokens |",
    ),
    (
        "safety",
        f"{WATCHED_HOLDBACK.base} tokens, from the first one on | up to {WATCHED_HOLDBACK.max} tokens |",
    ),
    ("safety", f"Doubt begins at {thresholds.SUSPICION_RATIO} of the score at which an answer is examined."),
    ("safety", f"the message's last {thresholds.CONTINUED_CHARS:,} characters"),
    ("safety", f"plus one second for every {thresholds.ENCODER_CHARS_PER_S:,} characters"),
    ("safety", f"read in slices of {turns.SLICE_CHARS:,} characters"),
    ("safety", f"up to {turns.SHORT_CHARS} characters"),
    ("safety", f"its score times {turns.DECAY} for each turn since"),
    ("safety", f"it remembers {remembered.JUDGED:,} texts"),
    ("safety", f"it reads the {thresholds.ENCODED_TEXTS} texts that the n-grams doubt most"),
    ("safety", f"a phrase of {allow.MIN_PHRASE_CHARS} to {allow.MAX_PHRASE_CHARS} characters"),
    ("safety", f"A file has at most {allow.MAX_ENTRIES} entries."),
    ("safety", f"the newest {turns.EDITED_CHARS:,} characters"),
    ("safety", f"the message has at most {allow.MAX_TURN_CHARS:,} characters"),
    ("safety", f"{thresholds.GUARD_BLOCK} blocks, {thresholds.GUARD_WATCH} watches"),
    ("safety", f"Targets go from {thresholds.MIN_FPR} to {thresholds.MAX_FPR}."),
    ("guard", f"{thresholds.GUARD_BLOCK} blocks and {thresholds.GUARD_WATCH} watches"),
    ("guard", f"takes longer than {tier.TIMEOUT_S:g} s"),
)
"""Page and words."""


@pytest.mark.parametrize(("page", "words"), NUMBERS)
def test_numbers_are_those_of_the_code(page: str, words: str):
    """A number that the page gives is the constant's."""
    text = " ".join((Path(__file__).resolve().parents[2] / f"docs/{page}.md").read_text("utf-8").split())
    assert words in text
